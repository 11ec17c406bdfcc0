"""What a search's process says: one JSON object a line on its standard output, the last of them how it ended."""

from typing import Any

import msgspec

MOST_LINE_BYTES = 8 << 20


class Order(msgspec.Struct, frozen=True):
    """The one line that the process reads. request: JSON of `edge.SearchIn`. seconds: the longest it may take."""

    request: str
    seconds: float


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """What goes on. best_goodput: requests a second; None until there is a plan."""

    what: str
    best_goodput: float | None = None


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """It ended with a plan. result: see `search_answer.answer`. stopped: by SIGINT, so it is the best so far."""

    result: dict[str, Any]
    stopped: bool = False


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It ended without one. stopped: by SIGINT."""

    error: str
    stopped: bool = False


Message = Progress | Answer | Failed
decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
