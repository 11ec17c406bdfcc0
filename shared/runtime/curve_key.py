"""The key of a suite on one host: the secret half of a CurveZMQ pair in a file that only its user can read.

The public half follows from it. A process without it connects to no control socket of the suite.
"""

from pathlib import Path

import zmq

from shared.errors import InvalidRequest
from shared.files.text import read_text


def new_key() -> str:
    """A new secret half (Z85)."""
    return zmq.curve_keypair()[1].decode()


def read_pair(file: Path) -> tuple[str, str]:
    """The pair (public, secret; Z85) of a key's file. Raises InvalidRequest that names the file."""
    try:
        secret = read_text(file).strip()
        return zmq.curve_public(secret.encode()).decode(), secret
    except (InvalidRequest, ValueError, zmq.ZMQError) as error:
        reason = (
            error.message
            if isinstance(error, InvalidRequest)
            else "not the secret half of a CurveZMQ pair (40 characters)"
        )
        raise InvalidRequest(
            f"the key file {file} cannot be used: {reason}; remove it and start the suite again: it makes a new one"
        ) from None
