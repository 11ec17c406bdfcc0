"""`adaptive` decides as the terms say when they are written down plainly: what makes it fast changes nothing."""

from random import Random

import pytest

from shared.domain.instance import InstanceView, Role
from shared.domain.job import JobView, LengthPrediction, Slo
from shared.domain.rates import LinkRate, PartialPrefillCost, Rates, StepForm, StepRates
from shared.policy.adaptive import Adaptive, AdaptiveDispatch, AdaptiveSplit
from shared.policy.estimate import PrefillSide, mean_wait_s
from shared.policy.index import ClusterIndex
from shared.policy.placement import Policies, place
from shared.policy.prefix_index import PrefixIndex, saved_tokens
from tests.shared.policy.plain_adaptive import Decode, Prefill, Way, total, ways
from tests.shared.policy.views import instance, view

ALL = Policies(Adaptive(), AdaptiveSplit(), AdaptiveDispatch())
BLOCKS = tuple(range(1, 50))


def rates(number: int, rng: Random) -> Rates:
    speed = rng.choice((0.3, 1.0, 2.5))
    prompt, decodes = (1e-4 / speed, 1e-8 / speed), (1e-4 / speed, 2e-7 / speed)
    step = StepRates(
        StepForm(0.02 / speed, *prompt),
        StepForm(0.02 / speed, 0.0, 0.0, *decodes),
        StepForm(0.022 / speed, *prompt, *decodes),
    )
    slow = {"i0": 5e5} if rng.random() < 0.3 else {}
    link = LinkRate(rng.choice((2e6, 2e9)), 1e-3, slow) if rng.random() < 0.9 else None
    return Rates(PartialPrefillCost(1e-4 * 1.5**number, 0.0), step=step, link=link)


def some_instance(number: int, rng: Random) -> InstanceView:
    role = rng.choice((Role.PREFILL, Role.DECODE)) if number > 1 else list(Role)[number]
    queued = rng.choice((0, 0, 3, 20))
    load = {"queued_prefill": queued, "queued_prefill_tokens": queued * rng.randrange(1, 900)}
    full = rng.random() < 0.3
    if role is Role.DECODE:
        coming, decoding = rng.choice((0, 30)), rng.choice((0, 9, 32, 60))
        load |= {
            "coming": coming,
            "coming_tokens": coming * 700,
            "decoding": coming + decoding,
            "context_tokens": coming * 700 + decoding * 600,
            "inbound_bytes": rng.choice((0, 10**6)),
            "prefill_share": rng.choice((0.0, 0.4)),
            "waiting_tokens": rng.randrange(4_000) if full else 0,
        }
    else:
        load["staged_bytes"] = rng.choice((0, 10**6))
    free = rng.randrange(90) if full else 4_000
    return instance(
        f"i{number}",
        role,
        rates=rates(number, rng),
        max_seqs=rng.choice((0, 32)),
        total_blocks=4_000,
        **load | {"free_blocks": free},
    )


def some_job(rng: Random) -> JobView:
    lower = 200 * rng.randrange(3)
    prediction = LengthPrediction(lower // 200, lower, lower + 200, 0.8, "classifier") if rng.random() < 0.8 else None
    slo = Slo("any", rng.choice((0.5, 2.0)), rng.choice((0.03, 0.1)))
    prompt = rng.randrange(1, 3_000)
    prefix = BLOCKS[: prompt // 64] if rng.random() < 0.5 else ()
    return JobView("j", prompt, 1_000, slo=slo, prediction=prediction, prefix=prefix)


def plainly(job: JobView, index: ClusterIndex) -> tuple[Way, float]:
    """The way with the least harm, and that harm."""
    answers = index.ledger.answers

    def saved(one: InstanceView) -> int:
        return saved_tokens(index.prefixes, one, job) if job.prefix else 0

    spread_s = mean_wait_s([PrefillSide(one) for one in index.prefill.views])
    prefills = [Prefill(one, saved(one)) for one in index.prefill.views]
    decodes = [Decode(one, saved(one), answers.expected(job), answers.all, spread_s) for one in index.decode.views]
    return min(((way, total(way, job)) for way in ways(job, prefills, decodes)), key=lambda one: one[1])


@pytest.mark.parametrize("seed", range(150))
def test_decisions_are_those_of_the_plain_terms(seed: int) -> None:
    """Of at most five instances, no two of them equally fast, all are candidates."""
    rng = Random(seed)
    views = [some_instance(number, rng) for number in range(rng.randrange(2, 6))]
    prefixes = PrefixIndex()
    for one in views:
        if rng.random() < 0.4:
            prefixes.replace(one.instance_id, 1, BLOCKS[: rng.randrange(50)])
    index = ClusterIndex(view(*views), rng=Random(0), prefixes=prefixes)
    for _ in range(4):
        job = some_job(rng)
        routed = place(job, index, ALL, 0.0, Random(0))
        way, least = plainly(job, index)
        assert float(routed.reasons[-1].figures["harm"]) == pytest.approx(least, rel=1e-9, abs=1e-6)
        assert routed.decode is not None
        chosen = (routed.prefill.instance_id if routed.prefill else "", routed.decode.instance_id, routed.split)
        wanted = (way.prefill.view.instance_id if way.prefill else "", way.decode.view.instance_id, way.split)
        assert chosen == wanted
