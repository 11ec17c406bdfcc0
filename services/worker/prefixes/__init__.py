"""What the engine's prefix cache holds, in blocks of our own size, and the account that schedulers get of it."""
