"""Structured outputs of `bench overhead`, trees of traces, and walks of heaps."""

import importlib
import inspect
import json
import sys

import pytest

from benchmarks.heap_walk.sitecustomize import KEPT, allocators, walked
from benchmarks.overhead import KINDS, _figures, structured_aims
from benchmarks.trace_collector import Seen
from benchmarks.traces import faults, wait


def test_the_aim_is_about_the_worst_kind_of_each() -> None:
    fast, slow = _figures([10.0, 30.0, 31.0], [10.0, 10.0, 11.0]), _figures([50.0], [20.0])
    assert fast == {"suite_ttft_ms": 30.0, "plain_vllm_ttft_ms": 10.0, "ratio": 3.0, "beyond_ms": 18.0}
    aims = structured_aims({"a": {"cold": slow, "repeated": fast}, "b": {"cold": fast, "repeated": fast}})
    assert [(aim["got"], aim["met"]) for aim in aims.values()] == [(26.0, False), (18.0, True)]


def test_a_cold_grammar_is_a_new_one() -> None:
    for wish in KINDS.values():
        assert len({json.dumps(wish(number)) for number in range(20)}) == 20


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


@pytest.mark.parametrize(("path", "attribute"), [(path, attribute) for path, attribute, _ in KEPT])
def test_what_is_looked_for_is_there(path: str, attribute: str) -> None:
    module, _, name = path.rpartition(".")
    assert f"self.{attribute}" in inspect.getsource(getattr(importlib.import_module(module), name))


def test_each_object_is_counted_once_and_keys_are_too() -> None:
    key, value = "k" * 1_000, ["v" * 1_000]
    seen: set[int] = set()
    size = walked({key: value, "other": value}, seen)
    assert 2_000 < sys.getsizeof(key) + sys.getsizeof(value[0]) < size < 3_000
    assert walked([key, value], seen) < 200


def test_allocators_are_told_of_in_bytes() -> None:
    found = allocators()
    assert found["pss"] > 1 << 20
    assert 0 < found["c_used"] < found["pss"] << 3
