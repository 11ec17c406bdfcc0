"""How many prompt tokens a step may hold beside its decodes: `prompt_budget`.

Prompt tokens make a step longer, and with it the gap between two tokens of each stream in the step. With a step budget
(`EngineLimits.step_budget`) the step therefore holds as many as the least gap target allows. The policy decides how
many (`shared.policy.step_budget`); this module collects the load that the policy needs from the scheduler's requests.

Terms are those of `shared.sim.scheduler`. Of one step, the requests are:

- ending: in PREFILLING with one token left after some context. Its chunk costs as much as a decode, so it counts as a
  decode and always has a place in the step.
- joining here: streams that were handed over and have joined the batch in this plan. This step is their first.
- joining soon: streams whose KV is on the way, and the stream that starts next. This step delays their first one.
- decoding: the other requests that are in the decode group or ending, and that decode here.
- prefills: the requests in PREFILLING that are not ending; without any, the request that starts next.
"""

from math import inf
from typing import Protocol, TypeVar

from shared.domain.rates import StepRates
from shared.policy.prefill_order import PrefillQueue
from shared.policy.step_budget import StepLoad, gap_target_s, joining_gap_s, prefill_tokens
from shared.sim.group import DecodeGroup
from shared.sim.request import ScheduledRequest, State

R = TypeVar("R", bound=ScheduledRequest)


class Requests(Protocol[R]):
    """What is read of a `Scheduler`."""

    waiting: PrefillQueue[R]
    receiving: dict[R, None]
    running: dict[R, None]
    prefilling: dict[R, None]
    group: DecodeGroup[R]
    joined: list[R]


def prompt_budget(requests: Requests[R], rates: StepRates | None, room_tokens: int, now: float) -> int:
    """The most prompt tokens of the step that begins now, up to the `room_tokens` that its decodes leave.

    rates: the step costs that are known by now; without any, the room is the budget.
    """
    ending = [request for request in requests.prefilling if request.uncomputed_tokens == 1 and request.computed_tokens]
    load = step_load(requests, ending, now)
    return prefill_tokens(rates, load, max(0, room_tokens - len(ending))) + len(ending)


def step_load(requests: Requests[R], ending: list[R], now: float) -> StepLoad:
    """The decodes of the coming step, with the streams that join soon; and the least gap target of these and of the
    prefills that are to decode here.
    """
    here = [request for request in requests.joined if request.is_stream]
    soon = _joining_soon(requests)
    in_group = [request for request in requests.running if request.state is State.DECODING]
    decoding = [request for request in (*in_group, *ending) if request.decodes and request not in here]
    under_way = [request for request in requests.prefilling if request not in ending]
    prefills = under_way
    if not under_way and len(requests.waiting):
        prefills = [requests.waiting.peek()]

    gaps_s = [gap_target_s(request.job.slo) for request in (*decoding, *prefills) if request.decodes]
    gaps_s += [joining_gap_s(request.job.slo, _waited_s(request, now), here=True) for request in here]
    gaps_s += [joining_gap_s(request.job.slo, _waited_s(request, now), here=False) for request in soon]

    ending_tokens = sum(request.computed_tokens for request in ending if request.decodes)
    soon_tokens = sum(request.tokens for request in soon)
    return StepLoad(
        decodes=len(decoding) + len(here) + len(soon),
        context_tokens=requests.group.context_tokens + ending_tokens + soon_tokens,
        gap_s=min(gaps_s, default=inf),
        before_tokens=max((request.computed_tokens for request in under_way), default=0),
    )


def _joining_soon(requests: Requests[R]) -> list[R]:
    soon = [request for request in requests.receiving if request.is_stream]
    next_stream = requests.waiting.stream
    if next_stream is not None:
        soon.append(next_stream)
    return soon


def _waited_s(request: ScheduledRequest, now: float) -> float:
    """How long a stream has waited since it was handed over with its KV; 0 after a preemption here."""
    if not request.import_tokens:
        return 0.0
    return now - request.last_token_s
