"""The database: tables, migrations, and the writer that no request waits for."""
