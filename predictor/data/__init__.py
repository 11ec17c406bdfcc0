"""Training data: prompts, the answers of the model that is served, and what of both a checkpoint learns from."""
