"""A model's folder: what its config.json says that decides whether it can be served, and how large its weights are."""
