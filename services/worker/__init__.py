"""One instance: an engine, its KV connector, and the prefill and decode sides of it."""
