"""`bench overhead` on structured outputs: what it concludes from times, and that no two of its grammars are alike."""

import json

from lab.bench.overhead import KINDS, _figures, structured_aims


def test_the_aim_is_about_the_worst_kind_of_each() -> None:
    fast, slow = _figures([10.0, 30.0, 31.0], [10.0, 10.0, 11.0]), _figures([50.0], [20.0])
    assert fast == {"suite_ttft_ms": 30.0, "plain_vllm_ttft_ms": 10.0, "ratio": 3.0, "beyond_ms": 18.0}
    aims = structured_aims({"a": {"cold": slow, "repeated": fast}, "b": {"cold": fast, "repeated": fast}})
    assert [(aim["got"], aim["met"]) for aim in aims.values()] == [(26.0, False), (18.0, True)]


def test_a_cold_grammar_is_a_new_one() -> None:
    for wish in KINDS.values():
        assert len({json.dumps(wish(number)) for number in range(20)}) == 20
