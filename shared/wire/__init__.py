"""Everything that crosses a ZeroMQ socket: messages, methods, and the RPC and pub/sub helpers."""
