"""What a trace is good for: one tree, and how much of the wait for the first token is in no span."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lab.bench.trace_collector import Seen

AROUND = ("attempt", "chat ", "text_completion ", "POST ")  # hold others and explain nothing


@dataclass(frozen=True, slots=True)
class Wait:
    """For the first token, since the request's first byte: all of it, and what no span explains, in seconds."""

    ttft_s: float
    missing_s: float


def faults(spans: Sequence[Seen], client: str = "") -> list[str]:
    """Why these are not one tree below the span `client`; nothing if they are."""
    ids = Counter(span.span_id for span in spans)
    found = [f"{count} spans are {one}" for one, count in ids.items() if count > 1]
    if len({span.trace_id for span in spans}) != 1:
        found.append("more than one trace")
    roots = [span.name for span in spans if span.parent_id == client]
    if len(roots) != 1:
        found.append(f"roots: {roots}")
    found += [
        f"{span.name} hangs in the air" for span in spans if span.parent_id not in ids and span.parent_id != client
    ]
    return found


def wait(spans: Sequence[Seen]) -> Wait | None:
    """Of a request with one job; None where it has no first token."""
    first_token_s = next((span.events["first_token"] for span in spans if "first_token" in span.events), 0.0)
    if not first_token_s:
        return None
    began_s = min(span.began_s for span in spans if span.kind == "server" and span.service.endswith("gateway"))
    missing_s, at_s = 0.0, began_s
    for span in sorted(spans, key=lambda span: span.began_s):
        if span.name.startswith(AROUND) or span.began_s >= first_token_s:
            continue
        missing_s += max(0.0, span.began_s - at_s)
        at_s = max(at_s, span.ended_s)
    return Wait(first_token_s - began_s, missing_s + max(0.0, first_token_s - at_s))
