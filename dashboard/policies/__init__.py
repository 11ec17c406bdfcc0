"""The policies in force, and how they are changed."""
