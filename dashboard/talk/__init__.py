"""A chat through the API, with what became of it."""
