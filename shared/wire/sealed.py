"""Messages of state end with a checksum: what came over the wire with other bits is dropped, not believed."""

import xxhash

SEAL_BYTES = 8


def sealed(body: bytes) -> bytes:
    """The message for a body."""
    return body + xxhash.xxh3_64_digest(body)


def opened(message: bytes) -> memoryview | None:
    """The body of a message, no copy; None where its bits are not those that were sealed."""
    view = memoryview(message)
    body = view[:-SEAL_BYTES]
    return body if xxhash.xxh3_64_digest(body) == view[-SEAL_BYTES:] else None
