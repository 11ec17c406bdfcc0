"""`polyphase explain`: bars in their places, sentences, figures on demand."""

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from services.launcher.events import Explained, find_request, show_explanation, waterfall
from shared.domain.job import NAME_CHARS, job_name
from shared.domain.route import Reason
from shared.errors import InvalidRequest, NotFound, Unavailable
from shared.explain import explain
from shared.timeline import Decision, RequestTimeline, Span, SpanRecord


def timeline(**changes: Any) -> RequestTimeline:
    spans = [
        SpanRecord(Span.QUEUE, 100.0, 100.5, "prefill-0"),
        SpanRecord(Span.PREFILL, 100.5, 101.0, "prefill-0"),
        SpanRecord(Span.DECODE, 101.0, 102.0, "decode-in-a-rack-with-a-long-name-17", 2),
    ]
    reason = Reason("odd", {"weight": 0.25, "instances": 4.0, "chosen": "prefill-0"})
    told = {"first_token_s": 101.0, "last_token_s": 102.0, "ended_s": 102.0, "outcome": "stop", "output_tokens": 11}
    decisions = [Decision(100.0, "placement", "prefill-0", (reason,))]
    return RequestTimeline("chatcmpl-x", 100.0, 512, **{**told, "spans": spans, "decisions": decisions, **changes})


def drawn(one: RequestTimeline, *, width: int = 80, figures: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show_explanation(console, Explained(one, explain(one)), figures=figures)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in lines)
    return [line.rstrip() for line in lines]


def bars(one: RequestTimeline, width: int = 80) -> list[str]:
    return [str(row) for row in waterfall(one, width)]


def test_bars_follow_each_other_and_are_as_long_as_their_times() -> None:
    rows = bars(timeline())
    starts = [row.index("█") for row in rows[:3]]
    lengths = [row.count("█") for row in rows[:3]]
    assert starts[1] == starts[0] + lengths[0]
    assert starts[2] == starts[1] + lengths[1]
    assert lengths[2] == pytest.approx(2 * lengths[0], abs=2)
    assert [row.split()[-2:] for row in rows[:2]] == [["0.5", "s"], ["0.5", "s"]]
    assert "▲ first token after 1 s" in rows[3]
    assert rows[3].index("▲") <= starts[2]


def test_a_long_decode_leaves_the_rest_its_room() -> None:
    long = timeline(spans=[*timeline().spans[:2], SpanRecord(Span.DECODE, 101.0, 1_000.0, "d")])
    rows = bars(long)
    assert rows[0].count("█") > 5
    assert rows[2].count("█") > 10


def test_stretches_too_short_for_a_column_have_one() -> None:
    short = timeline(
        spans=[SpanRecord(Span.QUEUE, 100.0, 100.000_01, "p"), SpanRecord(Span.PREFILL, 100.0, 101.0, "p")]
    )
    assert bars(short)[0].count("█") == 1


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_it_fits(width: int) -> None:
    assert any("█" in line for line in drawn(timeline(), width=width))


def test_names_keep_their_ends_and_say_the_attempt() -> None:
    assert any(line.startswith("decode · ") and "name-17 · attempt 2" in line for line in drawn(timeline(), width=90))


def test_figures_come_on_demand() -> None:
    text = "\n".join(drawn(timeline()))
    assert "Prefill went to prefill-0" in text
    assert "\n         weight 0.25" not in text
    assert "weight 0.25, instances 4, chosen prefill-0" in "\n".join(drawn(timeline(), figures=True))


def test_one_under_way_has_no_mark_of_a_first_token() -> None:
    lines = drawn(timeline(first_token_s=0.0, last_token_s=0.0, ended_s=0.0, outcome="", spans=timeline().spans[:1]))
    assert "Under way" in lines[1]
    assert not any("▲" in line for line in lines)


def test_one_of_which_nothing_is_known_yet() -> None:
    bare = timeline(first_token_s=0.0, last_token_s=0.0, ended_s=0.0, outcome="", spans=[], decisions=[])
    assert bars(bare) == []
    assert any("Under way" in line for line in drawn(bare))


async def test_an_empty_id_and_a_suite_that_is_away() -> None:
    with pytest.raises(InvalidRequest, match="polyphase requests"):
        await find_request(["http://127.0.0.1:9"], " ")
    with pytest.raises(Unavailable):
        await find_request(["http://127.0.0.1:9"], "x")


class Scheduler:
    """Knows the requests of `ids`."""

    ids: tuple[str, ...] = ()

    def __init__(self, _: str) -> None:
        pass

    async def close(self) -> None:
        pass

    async def requests(self, limit: int) -> list[dict[str, Any]]:
        return [{"job_id": each} for each in self.ids[:limit]]

    async def call(self, _: str, path: str, **__: Any) -> Any:
        if path == "/requests/search":
            return {"rows": []}
        job_id = path.removeprefix("/requests/").removesuffix("/timeline")
        if job_id not in self.ids:
            raise NotFound(job_id)
        return msgspec.to_builtins(msgspec.structs.replace(timeline(), job_id=job_id))


@pytest.mark.parametrize("wanted", ["4257/g6hr", "a, b", "\u0437\u0430", "x" * 500, "x" * 20, "cmpl-4257=2Fg6hr-0-aa"])
async def test_a_request_is_found_by_the_id_that_its_client_sent(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    sent = ("4257/g6hr", "a, b", "\u0437\u0430", "x" * 500)
    ids = tuple(f"cmpl-{job_name(name)}"[:NAME_CHARS] + "-0-aa" for name in sent)
    monkeypatch.setattr(Scheduler, "ids", ids)
    monkeypatch.setattr("services.launcher.events.SchedulerAdmin", Scheduler)
    found = (await find_request(["http://127.0.0.1:9"], wanted)).timeline.job_id
    assert found == next(each for each in ids if each == wanted or job_name(wanted)[:100] in each)
