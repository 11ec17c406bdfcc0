from concurrent.futures import Future

import pytest

from dashboard.operations import Action, Intent, Operation, consequences, question
from dashboard.records import AuditEntry
from shared.domain.instance import Role
from shared.errors import OutcomeUnknown, PeerLost


def intent(action: Action, inflight: int = 0) -> Intent:
    return Intent(action, "p0", Role.PREFILL, inflight, last_ready=False)


@pytest.mark.parametrize(
    ("action", "inflight", "asked", "follows"),
    [
        (Action.FLIP, 1, "Flip p0 from prefill to decode?", "It first drains 1 job (at most 30 s), then changes"),
        (Action.FLIP, 0, "Flip p0 from prefill to decode?", "It has no jobs to drain, then changes"),
        (Action.DRAIN, 2, "Drain p0?", "It takes no new prefill work and finishes 2 jobs (this waits at most 30 s)."),
        (Action.RESUME, 2, "Resume p0?", "It takes new prefill work again."),
    ],
)
def test_what_is_asked(action: Action, inflight: int, asked: str, follows: str) -> None:
    wanted = intent(action, inflight)
    assert question(wanted) == asked
    assert consequences(wanted, 30.0).startswith(follows)


def test_under_way_and_ended() -> None:
    future: Future[AuditEntry] = Future()
    operation = Operation(intent(Action.FLIP), future, started_s=100.0)
    assert operation.outcome(103.0).text == "Flipping p0: 3 s so far."
    future.set_result(AuditEntry("op", "flip", "p0", "prefill", "decode", "dashboard", 100.0, "succeeded", 0.0, 0.0004))
    assert operation.outcome(104.0).text == "p0 is now decode (was prefill). Drain 0 ms, flip 0.4 ms."


@pytest.mark.parametrize("error", [PeerLost("p0 is gone"), RuntimeError("p0 is gone")])
def test_failed(error: Exception) -> None:
    future: Future[AuditEntry] = Future()
    future.set_exception(error)
    outcome = Operation(intent(Action.FLIP), future).outcome(0.0)
    assert outcome.state == "failed"
    assert "p0 is gone" in outcome.text


def test_no_answer_is_not_a_failure() -> None:
    future: Future[AuditEntry] = Future()
    future.set_exception(OutcomeUnknown("whether the flip of p0 was carried out is unknown", operation_id="4f"))
    outcome = Operation(intent(Action.FLIP), future).outcome(0.0)
    assert outcome.state == "unknown"
    assert outcome.text.endswith("unknown. Ask by its id, here or with: polyphase operation 4f")
