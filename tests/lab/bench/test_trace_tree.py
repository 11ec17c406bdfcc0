"""What counts as one tree, and as a time that is explained."""

from lab.bench.trace_collector import Seen
from lab.bench.traces import faults, wait


def span(name: str, began_s: float, ended_s: float, own: str, parent: str, **events: float) -> Seen:
    kind = "server" if name.startswith("POST") else "internal"
    return Seen(name, "polyphase-gateway", "g", "t", own, parent, kind, began_s, ended_s, False, "", {}, events)


TREE = [
    span("POST /v1/chat/completions", 0.0, 10.0, "a", "client"),
    span("chat demo", 1.0, 9.0, "b", "a", first_token=5.0),
    span("attempt", 1.0, 9.0, "c", "b"),
    span("receive", 0.0, 1.0, "d", "a"),
    span("prefill", 1.5, 4.0, "e", "c"),
    span("transfer", 2.0, 4.5, "f", "c"),
    span("decode", 6.0, 9.0, "g", "c"),
]


def test_a_tree_is_one() -> None:
    assert faults(TREE, "client") == []
    assert faults(TREE[:-4] + TREE[-3:], "client") == []
    assert faults(TREE) == ["roots: []", "POST /v1/chat/completions hangs in the air"]
    assert faults([one for one in TREE if one.name != "attempt"], "client") == [
        f"{name} hangs in the air" for name in ("prefill", "transfer", "decode")
    ]
    assert len(faults([*TREE, TREE[-1]], "client")) == 1


def test_what_no_span_explains() -> None:
    found = wait(TREE)
    assert found is not None
    assert (found.ttft_s, found.missing_s) == (5.0, 1.0)
    assert wait(TREE[:1]) is None
