"""How fast instances prefill, by the rates that they report, and how much prefill waits at them, in seconds."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from math import log
from random import Random
from statistics import median

from shared.domain.instance import InstanceView
from shared.domain.rates import Rates

CLASS_WIDTH = 1.1  # instances whose speeds differ by less count as equally fast
_LOG_WIDTH = log(CLASS_WIDTH)
UNKNOWN_S_PER_TOKEN = 1e-4  # of a prefill, where nothing was measured: 10,000 tokens a second

Speed = Callable[[InstanceView], tuple[float, float]]
Key = tuple[float, float, str]


def prefill_rate(rates: Rates) -> tuple[float, float]:
    """Seconds a prompt token, and seconds a prompt, on an instance that only prefills; (0, 0) when not measured.

    Source: Cronus eq. 2, k_p and b_p.
    """
    cost = rates.prefill
    if cost is None or cost.k_p <= 0:
        return 0.0, 0.0
    return cost.k_p, max(0.0, cost.b_p)


def chunked_rate(view: InstanceView) -> tuple[float, float]:
    """The same beside the decodes that run there: a step takes as long as they make it, and has room for so much less.

    Source: Cronus eq. 3 at a prefill context of 0, over the tokens of a step that decodes leave. Without a measured
    chunked cost it is `prefill_rate`.
    """
    cost, load = view.info.rates.chunked, view.load
    step_s = cost.time_s(0.0, load.context_tokens) if cost else 0.0
    if step_s <= 0:
        return prefill_rate(view.info.rates)
    return step_s / max(1, view.info.chunk_size - load.decoding), 0.0


def queued_prefill_s(view: InstanceView, unknown_s_per_token: float = UNKNOWN_S_PER_TOKEN) -> float:
    """Seconds of prefill that wait at a prefill instance."""
    load = view.load
    per_token_s, per_job_s = prefill_rate(view.info.rates)
    return (per_token_s or unknown_s_per_token) * load.queued_prefill_tokens + per_job_s * load.queued_prefill


class Backlog:
    """Instances by speed and backlog, in the order in which a placement asks for them.

    backlog = s * queued tokens + base * queued jobs: seconds of prefill that wait. `speed` gives (s, base) of an
    instance. One without a measured speed gets the median of the measured ones, or 1 s a token when none is measured:
    then backlogs are plain token counts. Source: Cronus eq. 2 for the form.
    """

    def __init__(self, views: Iterable[InstanceView], rng: Random, speed: Speed) -> None:
        self._speed = speed
        speeds = [(view, *speed(view)) for view in views]
        known = [per_token_s for _, per_token_s, _ in speeds if per_token_s > 0]
        self._unknown_s = median(known) if known else 1.0
        self._unmeasured = {view.info.instance_id for view, per_token_s, _ in speeds if not per_token_s > 0}
        self._rates: dict[str, tuple[float, float]] = {}
        self._keys: dict[str, Key] = {}
        self._class_of: dict[str, int] = {}
        # By class of speed: within one the shortest backlog is (nearly) the best for a prompt of any length.
        self._order: dict[int, list[Key]] = {}
        classes: dict[float, int] = {}
        for view, per_token_s, per_job_s in speeds:
            instance_id, load, per_token_s = view.info.instance_id, view.load, per_token_s or self._unknown_s
            waits_s = per_token_s * load.queued_prefill_tokens + per_job_s * load.queued_prefill
            found = classes.get(per_token_s)
            if found is None:
                found = classes[per_token_s] = speed_class(per_token_s)
            self._rates[instance_id] = per_token_s, per_job_s
            self._class_of[instance_id] = found
            # Ties break at random, once a broadcast: several schedulers must not all like the same idle instance.
            key = self._keys[instance_id] = waits_s, rng.random(), instance_id
            self._order.setdefault(found, []).append(key)
        for keys in self._order.values():
            keys.sort()

    def classes(self) -> Iterable[Sequence[Key]]:
        """For each class of speed (backlog in seconds, tie-break, instance id), least backlog first."""
        return self._order.values()

    def waits_s(self, instance_id: str) -> float:
        """Seconds of prefill that wait there."""
        return self._keys[instance_id][0]

    def cost_s(self, instance_id: str, tokens: int) -> float:
        """Seconds that a prefill of `tokens` takes there, once it is its turn."""
        per_token_s, per_job_s = self._rates[instance_id]
        return per_token_s * tokens + per_job_s

    def refresh(self, view: InstanceView, tie: float | None = None) -> bool:
        """Take in a changed load, and perhaps rates; unknown instances are ignored. `tie`: another tie-break.

        False when its speed was not measured before and is now, or the other way round: what stands for those that are
        not is another then, and this is to be made anew.
        """
        instance_id, load = view.info.instance_id, view.load
        key = self._keys.get(instance_id)
        if key is None:
            return True
        per_token_s, per_job_s = self._speed(view)
        if (per_token_s > 0) is (instance_id in self._unmeasured):
            return False
        keys = self._order[self._class_of[instance_id]]
        del keys[bisect_left(keys, key)]
        per_token_s = per_token_s or self._unknown_s
        waits_s = per_token_s * load.queued_prefill_tokens + per_job_s * load.queued_prefill
        self._rates[instance_id] = per_token_s, per_job_s
        self._class_of[instance_id] = found = speed_class(per_token_s)
        self._keys[instance_id] = key = waits_s, key[1] if tie is None else tie, instance_id
        insort(self._order.setdefault(found, []), key)
        return True


def speed_class(per_token_s: float) -> int:
    """The same for those that need about as long."""
    return round(log(per_token_s) / _LOG_WIDTH)
