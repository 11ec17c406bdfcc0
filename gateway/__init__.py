"""The API process: vLLM's API layer over our cluster."""
