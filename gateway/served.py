"""The paths of the API."""

# Everything else that vLLM mounts is about engines in its own process, other kinds of models, or other servers.
SERVED = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ping",
        "/version",
        "/metrics",
        "/openapi.json",
        "/docs",
    }
)
