"""Instances, a job and its route, for tests of what `adaptive` decides and estimates."""

from random import Random

from shared.domain.instance import InstanceView
from shared.domain.job import JobView, LengthPrediction, Slo
from shared.domain.rates import LinkRate, Rates, StepForm, StepRates
from shared.domain.route import Route
from shared.policy.adaptive import Adaptive, AdaptiveDispatch, AdaptiveSplit
from shared.policy.placement import Policies, place
from tests.shared.policy.views import decode, index, job, prefill

ALL = Policies(Adaptive(), AdaptiveSplit(), AdaptiveDispatch())
TARGETS = Slo("default", ttft_s=2.0, tpot_s=0.1)


def rates(speed: float = 1.0, link: LinkRate | None = LinkRate(10e9, 1e-3)) -> Rates:
    """An instance `speed` times as fast as one with steps of 20 ms and 0.1 ms a prompt token."""
    decodes = {"sequence_s": 1e-4 / speed, "context_s": 2e-7 / speed}
    step = StepRates(
        StepForm(0.02 / speed, 1e-4 / speed, 1e-9 / speed),
        StepForm(0.02 / speed, **decodes),
        StepForm(0.02 / speed, 1e-4 / speed, 1e-9 / speed, **decodes),
    )
    return Rates(step=step, link=link)


def p(name: str = "p", speed: float = 1.0, **load: object) -> InstanceView:
    return prefill(name, rates=rates(speed), total_blocks=4000, **load)


def d(name: str = "d", speed: float = 1.0, **load: object) -> InstanceView:
    return decode(name, **{"rates": rates(speed), "total_blocks": 4000, **load})


def busy(decodes: int, context: int = 600, **more: object) -> dict[str, object]:
    return {"decoding": decodes, "running": decodes, "context_tokens": decodes * context, **more}


def asked(prompt: int = 800, **more: object) -> JobView:
    return job(prompt, 1000, slo=TARGETS, prediction=LengthPrediction(0, 100, 200, 0.9, "classifier"), **more)


def route(asked_for: JobView, *views: InstanceView, policies: Policies = ALL, seed: int = 0) -> Route:
    return place(asked_for, index(*views), policies, 0.0, Random(seed))


def way(found: Route) -> tuple[str, str, str]:
    """Prefill instance, decode instance, and how much of the prompt the first one computes."""
    names = (found.prefill.instance_id if found.prefill else "", found.decode.instance_id if found.decode else "")
    return *names, "none" if not found.split else "all" if found.split >= 800 else "part"
