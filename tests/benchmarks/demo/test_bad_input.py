"""The list of bad input."""

from benchmarks.demo.answers import cases


def test_every_case_wants_a_4xx_and_has_something_to_send() -> None:
    found = cases("m", 2048, 1000)
    assert len({case.name for case in found}) == len(found) >= 15
    for case in found:
        assert all(400 <= status < 500 for status in case.want)
        assert (case.body is None) != (case.content is None)
