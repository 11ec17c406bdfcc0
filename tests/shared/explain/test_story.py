from random import Random

import pytest

from shared.domain.estimated import Estimated, RouteKind
from shared.domain.kv import TransferOutcome, TransferReport
from shared.domain.route import Reason
from shared.explain import explain
from shared.explain.reasons import PHRASES
from shared.explain.story import sentence
from shared.policy import registry
from shared.policy.placement import Policies, place
from shared.timeline import Decision, RequestTimeline, Span, SpanRecord
from tests.shared.policy.views import decode, index, job, prefill

AHEAD: dict[str, float | str] = {
    "split": 800,
    "decode": "decode-0",
    "wait_s": 0.48,
    "runner_up": "prefill-0",
    "runner_up_wait_s": 1.18,
    "saved_tokens": 512,
}


def disaggregated() -> RequestTimeline:
    spans = [
        SpanRecord(Span.INTAKE, 100.0, 100.01),
        SpanRecord(Span.PLACEMENT, 100.01, 100.0102),
        SpanRecord(Span.QUEUE, 100.02, 100.5, "prefill-1"),
        SpanRecord(Span.PREFILL, 100.5, 100.62, "prefill-1"),
        SpanRecord(Span.TRANSFER, 100.55, 100.65, "decode-0"),
        SpanRecord(Span.DECODE, 100.66, 104.6, "decode-0"),
    ]
    decisions = [
        Decision(100.01, "placement", "prefill-1", (Reason("placement:adaptive", AHEAD),)),
        Decision(100.6, "dispatch", "decode-0", (Reason("dispatch:random", {"chosen": "decode-0"}),)),
    ]
    transfers = [TransferReport(TransferOutcome.PULLED, 800, 8_000_000, 100.55, 100.65, transport="tcp")]
    return RequestTimeline(
        "job", 100.0, 800, 129, 100.62, 104.59, 104.6, "stop", spans=spans, decisions=decisions, transfers=transfers
    )


def test_a_whole_request() -> None:
    told = explain(disaggregated())
    assert told.headline == (
        "Completed (stop): the first token after 0.62 s, of which 0.48 s in the queue of prefill-1; "
        "129 tokens, one each 31 ms."
    )
    assert [one.text for one in told.steps] == [
        "It came with a prompt of 800 tokens.",
        "It was read and tokenised in 10 ms.",
        "Prefill went to prefill-1: 0.48 s of work ahead, 0.7 s less than prefill-0; "
        "it holds 512 tokens of this prompt.",
        "It waited 0.48 s in the queue of prefill-1.",
        "prefill-1 computed its prompt in 0.12 s.",
        "Its KV came to decode-0 within 0.1 s.",
        "Decode went to decode-0: drawn at random.",
        "KV of 800 tokens, 8 MB, came over tcp in 0.1 s (80 MB/s).",
        "decode-0 produced its tokens in 3.94 s.",
    ]
    assert told.steps[2].figures == AHEAD
    assert [one.span for one in told.steps if one.span is not None] == [
        Span.INTAKE,
        Span.QUEUE,
        Span.PREFILL,
        Span.TRANSFER,
        Span.TRANSFER,
        Span.DECODE,
    ]


def test_the_longest_gap_says_when_and_where() -> None:
    timeline = disaggregated()
    timeline.spans[4:] = [
        SpanRecord(Span.TRANSFER, 100.63, 101.34, "decode-0"),
        SpanRecord(Span.DECODE_QUEUE, 101.34, 101.42, "decode-0"),
        SpanRecord(Span.DECODE, 101.42, 104.6, "decode-0"),
    ]
    timeline.itl_s, timeline.gaps, timeline.gaps_over = 0.25, 128, 1
    timeline.longest_gap_s, timeline.longest_gap_at_s, timeline.longest_gap_after = 0.8, 101.42, 1
    told = explain(timeline)
    assert told.headline.endswith("one each 31 ms; the longest gap between two of them 0.8 s, after token 1.")
    (gap,) = (one for one in told.steps if "longest gap" in one.text)
    assert gap.text == (
        "The longest gap between its tokens, 0.8 s, came between token 1 and the next: 0.71 s for its KV to come to "
        "decode-0, 80 ms until its first step on decode-0. 1 gap of 128 exceeded the target of 0.25 s."
    )
    assert gap.at_s == pytest.approx(0.62)


def test_a_request_under_way() -> None:
    timeline = disaggregated()
    timeline.outcome, timeline.ended_s, timeline.first_token_s, timeline.last_token_s = "", 0.0, 0.0, 0.0
    timeline.spans = timeline.spans[:3]
    assert explain(timeline).headline == "Under way, 0.5 s known: no token yet."


def test_failures() -> None:
    timeline = RequestTimeline("job", 100.0, 8, ended_s=110.0, outcome="unavailable")
    assert explain(timeline).headline == "Failed after 10 s (unavailable): no token."
    timeline.outcome = "cancelled"
    assert explain(timeline).headline == "Cancelled by its client after 10 s: no token."


def test_a_lost_attempt() -> None:
    timeline = disaggregated()
    reasons = (Reason("peer_lost", {"error": "decode-0 is lost", "tokens": 12}),)
    timeline.decisions = [Decision(101.0, "resume", "", reasons)]
    timeline.spans.append(SpanRecord(Span.DECODE, 102.0, 104.0, "decode-1", 2))
    told = explain(timeline)
    assert told.headline.endswith("; 2 attempts.")
    texts = [one.text for one in told.steps]
    assert "An attempt failed after 12 tokens; another one begins: decode-0 is lost (peer_lost)." in texts
    assert "decode-1 produced its tokens in 2 s (attempt 2)." in texts


def test_a_pause_and_a_move() -> None:
    timeline = disaggregated()
    figures: dict[str, float | str] = {"from": "decode-0", "tokens": 12, "waited_s": 0.5, "pause_s": 4.0}
    sooner: dict[str, float | str] = {"pause_s": 4.0, "elsewhere_s": 0.25}
    timeline.decisions = [
        Decision(102.0, "move", "decode-1", (Reason("paused", figures),)),
        Decision(102.1, "placement", "prefill-0", (Reason("sooner", sooner),)),
    ]
    timeline.spans += [
        SpanRecord(Span.PAUSED, 101.0, 101.25, "decode-0"),
        SpanRecord(Span.RECOMPUTED, 101.25, 101.5, "decode-0"),
        SpanRecord(Span.PAUSED, 101.5, 102.0, "decode-0"),
        SpanRecord(Span.DECODE, 102.0, 104.0, "decode-1", 2),
    ]
    told = explain(timeline)
    assert told.headline.endswith("; moved once because it was paused.")
    texts = [one.text for one in told.steps]
    assert "It was paused for 0.25 s: decode-0 took its KV memory back for other requests." in texts
    assert "decode-0 computed its tokens again in 0.25 s, until the next one was there." in texts
    assert (
        "It left decode-0 for decode-1 after 12 tokens: its KV memory there was taken back for other requests; it was "
        "expected to stay paused for 4 s; it had been so for 0.5 s."
    ) in texts
    assert ("Prefill went to prefill-0: its next token is expected in 0.25 s, and in 4 s where it is paused.") in texts


@pytest.mark.parametrize(
    ("decision", "said"),
    [
        (
            Decision(0.0, "placement", "prefill-1", (Reason("placement:adaptive", {"split": 300, "decode": "d-0"}),)),
            "Prefill of 300 of 800 tokens went to prefill-1, the rest to d-0.",
        ),
        (Decision(0.0, "placement", "d-0", (Reason("placement:adaptive", {"split": 0}),)), "d-0 computes it whole."),
        (
            Decision(0.0, "placement", "d-0", (Reason("local: no prefill instance is ready (1 dead)"),)),
            "d-0 computes it whole: without a prefill instance: no prefill instance is ready (1 dead).",
        ),
        (
            Decision(0.0, "prediction", "64 tokens or more", (Reason("observed", {"expected_tokens": 80.0}),)),
            "Its answer was predicted to have 64 tokens or more: by answers seen before; 80 tokens expected.",
        ),
        (
            Decision(0.0, "delay", "", (Reason("prompts for 2.00 s wait, 0.50 s may", {"cause": "prefill"}),)),
            "It had to wait for its turn: prompts for 2.00 s wait, 0.50 s may.",
        ),
        (
            Decision(0.0, "codec", "int4", (Reason("codec:int4", {"takes_s": 0.01, "raw_s": 0.04}),)),
            "Its KV was sent as int4: 10 ms on the way; exact it would take 40 ms.",
        ),
        (Decision(0.0, "something", "x"), "Something: x."),
    ],
    ids=lambda one: one.kind if isinstance(one, Decision) else "",
)
def test_decisions(decision: Decision, said: str) -> None:
    assert sentence(decision, 800) == said


@pytest.mark.parametrize("placement", registry.PLACEMENT)
@pytest.mark.parametrize("split", ["adaptive", "full", "none", "fraction", "cronus", "balanced"])
def test_real_routes_have_words(placement: str, split: str) -> None:
    there = index(prefill("p-0", rate=1e-4), prefill("p-1", rate=2e-4), decode("d-0"), decode("d-1"))
    parameters = {"routes": [["p-0", "d-0", 1.0]]} if placement == "plan" else {}
    policies = Policies(
        registry.placement(placement, parameters), registry.split(split), registry.dispatch("power_of_two")
    )
    route = place(job(200), there, policies, 0.0, Random(0)).route
    first = route.prefill or route.decode
    assert first is not None
    said = sentence(Decision(0.0, "placement", first.instance_id, route.reasons), 200)
    whole = f"{first.instance_id} computes it whole"
    assert said.startswith(("Prefill went to p-", "Prefill of ") if route.prefill else whole)
    assert all(reason.what in PHRASES or reason.what.startswith("local: ") for reason in route.reasons), route.reasons


def test_what_was_predicted_stands_beside_what_came() -> None:
    timeline = disaggregated()
    timeline.placed_s, timeline.estimated = 100.01, Estimated(0.39, 0.025, RouteKind.FULL, "prefill-1", "decode-0")
    told = next(one for one in explain(timeline).steps if "predicted" in one.text)
    assert told.text == (
        "Its first token was predicted after 0.4 s and came after 0.62 s; each further one was predicted to take 25 ms "
        "and took 31 ms."
    )
    assert told.at_s == pytest.approx(0.01)
