"""What the HTTP side knows of a request and the pipeline needs: who asks, and under which SLO class."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    key_name: str = ""
    slo: str = "default"


# vLLM's handlers carry no headers down to the engine; a context variable follows the request's task.
caller: ContextVar[Caller] = ContextVar("caller", default=Caller())
