"""The colours of the suite: one meaning each, in the dashboard, in plots and in reports, on light and dark grounds."""

from collections.abc import Mapping
from dataclasses import dataclass

from shared.domain.instance import InstanceState, Role
from shared.timeline import Span

PREFILL, DECODE, TRANSFER, IDLE = "#5b74ec", "#17a08c", "#d08a2a", "#8c94a3"
GOOD, CAUTION, BAD = "#2fa362", "#d08a2a", "#dc4f46"
FAINT, FAINTER = "#b3b9c4", "#d3d7de"  # what takes time but no accelerator

ROLE: Mapping[Role, str] = {Role.PREFILL: PREFILL, Role.DECODE: DECODE}
STATE: Mapping[InstanceState, str] = {
    InstanceState.STARTING: IDLE,
    InstanceState.READY: GOOD,
    InstanceState.DRAINING: CAUTION,
    InstanceState.UNRESPONSIVE: BAD,
    InstanceState.DEAD: BAD,
}
# The five of the chain queue → prefill → transfer → decode queue → decode are among them.
STAGE: Mapping[Span, str] = {
    Span.INTAKE: FAINTER,
    Span.PLACEMENT: FAINT,
    Span.HANDOVER: FAINTER,
    Span.QUEUE: IDLE,
    Span.PREFILL: PREFILL,
    Span.REPLY: FAINTER,
    Span.TRANSFER: TRANSFER,
    Span.DECODE_QUEUE: IDLE,
    Span.DECODE: DECODE,
    Span.PAUSED: BAD,
    Span.RECOMPUTED: PREFILL,
    Span.LOST: BAD,
}
# Of things that are only to be told apart, such as policies side by side: in this order, then again from the front.
SERIES = (PREFILL, "#e0653f", "#17a08c", "#9a62d6", "#b3860f", "#3f9fd8", "#c8559d", "#7f8f3a")


@dataclass(frozen=True, slots=True)
class Ground:
    """What colours stand on. `line`: of axes and grids; `soft`: of text with less weight."""

    page: str
    panel: str
    text: str
    soft: str
    line: str


LIGHT = Ground(page="#fbfbfc", panel="#f1f2f5", text="#1b1f27", soft="#636b79", line="#e1e4ea")
DARK = Ground(page="#101318", panel="#1a1e26", text="#e4e7ec", soft="#98a1b0", line="#2a303b")


Scale = list[tuple[float, str]]


def fading(colour: str, least: float = 0.06) -> Scale:
    """From nearly nothing to the colour, over whatever ground: for pages whose ground is not known here."""
    rgb = ",".join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))
    return [(0.0, f"rgba({rgb},{least})"), (1.0, f"rgba({rgb},1)")]


def steps(*colours: str) -> Scale:
    """Plain steps, each as wide as the next, for values that are kinds and not amounts."""
    share = 1.0 / len(colours)
    return [(min(1.0, edge * share), colour) for at, colour in enumerate(colours) for edge in (at, at + 1)]


ROLES = steps(fading(IDLE, 0.25)[0][1], PREFILL, DECODE)  # gone, prefill, decode: -1, 0, 1
KV, LOAD = fading(BAD), fading("#8a63c9")  # amounts: of KV in use, of jobs of any kind
