"""The cluster's secret: whoever changes something over HTTP shows it, from whatever host and process.

One for all services of a cluster. It is compared in constant time, sent with calls that change something and with no
others, and never part of a message, a log line or an address.
"""

import hmac
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from shared.errors import InvalidRequest, PolyphaseError, TokenMissing, TokenUnset, TokenWrong
from shared.files.text import read_text

OPEN = "open"  # in the place of a secret: whoever reaches the port may change what he likes
READING = frozenset({"GET", "HEAD", "OPTIONS"})
_SHAPE = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")  # what may follow `Bearer`, and long enough
_GIVE = (
    "send it as `Authorization: Bearer …`. The polyphase command takes it from its --data-dir, POLYPHASE_CLUSTER_TOKEN "
    "or POLYPHASE_CLUSTER_TOKEN_FILE, a service from POLYPHASE_<SERVICE>_CLUSTER_TOKEN or ..._FILE"
)


def new_token() -> str:
    """A new secret, 256 bits."""
    return secrets.token_urlsafe(32)


def checked(token: str, where: str) -> str:
    """The secret, if it can be one. Raises InvalidRequest that names `where`, and not what is there."""
    if token != OPEN and not _SHAPE.fullmatch(token):
        raise InvalidRequest(
            f"{where}: a cluster token is 16 to 512 letters, digits and ._~+/=-, or the word {OPEN}; "
            "`polyphase keys token` makes one"
        )
    return token


def read_token(file: Path) -> str:
    """The secret in a file, and nothing else in it. Raises InvalidRequest that names the file."""
    try:
        text = read_text(file)
    except InvalidRequest as error:
        raise InvalidRequest(f"the cluster token's file {error.message}") from None
    return checked(text.strip(), str(file))


def bearer(token: str) -> dict[str, str]:
    """The header; none without a secret."""
    return {"Authorization": f"Bearer {token}"} if token not in ("", OPEN) else {}


def fault_of(what: str, token: str, said: Sequence[str]) -> PolyphaseError | None:
    """Why `what` is refused where the secret is `token`; `said`: its headers of that name. None: it may be done."""
    if token == OPEN:
        return None
    if not token:
        return TokenUnset(
            f"{what}: this service was given no cluster token, so nothing can be changed by way of it: set its "
            f"cluster_token or cluster_token_file, or `cluster_token: {OPEN}` to let anybody"
        )
    shown = [value.strip() for scheme, _, value in (each.partition(" ") for each in said) if scheme.lower() == "bearer"]
    if not any(shown):
        return TokenMissing(f"{what} needs the cluster's secret: {_GIVE}")
    # Bytes: of text beyond ASCII, which a header may have, compare_digest makes an error.
    if len(shown) == 1 and hmac.compare_digest(shown[0].encode(), token.encode()):
        return None
    return TokenWrong(f"{what}: what was sent is not this cluster's secret: {_GIVE}")
