"""`polyphase bench kv_memory`: its aims, and a small model with windows on real engines."""

from dataclasses import replace

import pytest

from benchmarks.kv_memory import CASES, FULL, NEW_TOKENS, WINDOW, Case, HandedOver, Measured, Memory, measure, report

ROOM = 100_000_000
PLAIN = Memory(30_000_000, 20_000_000, ROOM)
FULL_LENGTH = Memory(60_000_000, 60_000_000, ROOM)
MET = Measured(
    [1, 2],
    plain=PLAIN,
    now=HandedOver([1, 2], PLAIN, Memory(22_000_000, 22_000_000, ROOM), 19_000_000),
    before=HandedOver([1, 2], FULL_LENGTH, FULL_LENGTH, 50_000_000),
)


def missed(measured: Measured, case: Case = CASES[0]) -> list[str]:
    aims = report(case, measured)["aims"]
    return [name.removeprefix(f"{case.key}_") for name, aim in aims.items() if not aim["met"]]


def test_memory_and_wire_are_within_a_tenth_of_plain_vllms() -> None:
    found = report(CASES[0], MET)
    assert (found["figures"]["gpt_oss_plain_peak_mb"], found["figures"]["gpt_oss_plain_peak_share"]) == (30.0, 0.3)
    assert (found["figures"]["gpt_oss_decode_pulled_mb"], found["figures"]["gpt_oss_decode_before_pulled_mb"]) == (
        19.0,
        50.0,
    )
    assert [row["engine"] for row in found["tables"]["KV of one request"]] == [
        "plain",
        "prefill",
        "decode",
        "prefill, before",
        "decode, before",
    ]
    assert missed(MET) == []
    much = Memory(33_100_000, 22_100_000, ROOM)
    assert missed(replace(MET, now=replace(MET.now, prefill=much))) == ["prefill_peak_over_plain"]
    assert missed(replace(MET, now=replace(MET.now, decode=much))) == [
        "decode_peak_over_plain",
        "decode_last_over_plain",
    ]
    assert missed(replace(MET, now=replace(MET.now, wire_bytes=22_100_000))) == ["pulled_over_plain_last"]
    assert missed(replace(MET, now=replace(MET.now, tokens=[1, 3]))) == ["tokens_of_plain"]
    assert missed(replace(MET, before=replace(MET.before, tokens=[1, 3]))) == ["tokens_of_plain"]


def test_the_models_have_the_layers_of_those_that_people_run() -> None:
    layers = {case.key: case.family.config["layer_types"] for case in CASES}
    assert {key: (each.count(WINDOW), each.count(FULL)) for key, each in layers.items()} == {
        "gpt_oss": (12, 12),
        "gemma_3": (52, 10),
    }
    assert {case.tokens for case in CASES} == {8192}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_window_takes_the_memory_of_plain_vllm() -> None:
    """Five of six layers have a window of 64 tokens; each layer is a group of vLLM's."""
    case = Case.of("Gemma-3", [WINDOW] * 5 + [FULL], 64, tokens=1000, chunk=128)
    found = await measure(case)
    assert len(found.tokens) == NEW_TOKENS
    assert missed(found, case) == []
    row = 2 * 2 * 32 * 2  # K and V of two heads
    assert found.now.wire_bytes == (1000 + 5 * 63) * row
    assert found.before.wire_bytes == 6 * 1000 * row
    every = 6 * 32 * 32 * row  # 32 blocks of 32 tokens
    assert (found.before.decode.last, found.before.decode.peak) == (every, every)
    assert found.now.decode.peak < every / 2
    assert found.now.decode.last == found.plain.last
