"""Files and programs of this machine, as the project's images have them."""

import sys
from collections.abc import Sequence

from services.launcher.model_source import PROJECT
from shared.errors import InvalidRequest

APP, MODELS, DATA, KEYS = "/app", "/models", "/data", "/etc/polyphase"
_THERE = (APP, MODELS, DATA, KEYS)


def from_here(text: str) -> str:
    """The same with the project's folder where images have it."""
    return text.replace(str(PROJECT), APP)


def require_there(text: str, at: str) -> None:
    """Raises InvalidRequest, which begins with `at`, for a path that no pod has."""
    if text.startswith("/") and not text.startswith(tuple(f"{folder}/" for folder in _THERE)):
        raise InvalidRequest(f"{at}: {text} is on this machine only: put it into the image or below {MODELS}")


def command_of(argv: Sequence[str]) -> tuple[str, ...]:
    """The program, listening on every address of its pod."""
    listening = {sys.executable: "python3", "127.0.0.1": "0.0.0.0"}
    return tuple(listening.get(word, from_here(word)) for word in argv)
