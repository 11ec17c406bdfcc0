"""Our KV connector in vLLM's terms: its scheduler half and its worker half."""
