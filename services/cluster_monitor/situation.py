"""The cluster's health: gathers what a verdict rests on, gives the verdict, and logs when it changes."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from services.cluster_monitor.events import Events
from services.cluster_monitor.load_history import kv_used
from services.cluster_monitor.policy_book import Followers
from services.cluster_monitor.registry import Record, Registry
from services.cluster_monitor.request_stats import Served, ServedBook, quantile, total, window_begins
from services.cluster_monitor.slo import DemandService
from services.cluster_monitor.verdict import judge
from shared.domain.instance import InstanceState, Role
from shared.domain.policies import PolicySet
from shared.domain.verdict import ClassSeen, Level, Peer, Situation, Stage, StageSeen, Standing, Thresholds, Verdict
from shared.policy.index import queued_prefill_s
from shared.wire.api import EventKind

FORGET_S = 900.0  # a silent gateway or scheduler is no longer missed after so long
FRESH_S = 0.5  # a verdict is given again for so long
PERIOD_S = 1.0  # between two looks for a change of the verdict, while something differs from what was logged
WORK = 2  # periods between two looks otherwise
REST = 5  # in a cluster that is at rest
_NEARLY = 0.8  # of the silence of a process that is gone; idle ones are silent for up to 7 s
STEADY = 3  # looks in a row that must agree before a change is logged: a window passes limits to and fro


class Peers:
    """When each gateway and scheduler was last heard of, by the loop's clock. Schedulers report both."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._schedulers: dict[str, float] = {}
        self._gateways: dict[str, float] = {}
        self._left: dict[str, float] = {}  # gateways that stopped in good order, and when: not all schedulers know yet

    def update(
        self, scheduler_id: str, gateways: Mapping[str, float], left: Iterable[str] = (), *, leaving: bool = False
    ) -> None:
        """A scheduler reports for how many seconds it has heard nothing of each gateway, and which gateways left."""
        now = self._clock()
        if leaving:
            self._schedulers.pop(scheduler_id, None)
        else:
            self._schedulers[scheduler_id] = now
        for name in left:
            if self._gateways.pop(name, None) is not None:
                self._left[name] = now
        for name, silent_s in gateways.items():
            heard = now - silent_s
            if heard > self._left.get(name, float("-inf")):
                self._left.pop(name, None)
                self._gateways[name] = max(self._gateways.get(name, heard), heard)

    def schedulers(self) -> dict[str, float]:
        """Seconds of silence, by name."""
        self._schedulers = self._recent(self._schedulers)
        return self._silent(self._schedulers)

    def gateways(self) -> dict[str, float]:
        """Seconds of silence, by name."""
        self._gateways, self._left = self._recent(self._gateways), self._recent(self._left)
        return self._silent(self._gateways)

    def _recent(self, heard: Mapping[str, float]) -> dict[str, float]:
        since = self._clock() - FORGET_S
        return {name: at for name, at in heard.items() if at > since}

    def _silent(self, heard: Mapping[str, float]) -> dict[str, float]:
        now = self._clock()
        return {name: now - at for name, at in sorted(heard.items())}


class Judge:
    """Gives `GET /verdict`. expected: the instances of the cluster file, with the roles that they start in."""

    def __init__(
        self,
        window_s: float,
        expected: Mapping[str, Role],
        registry: Registry,
        served: ServedBook,
        demand: DemandService,
        followers: Followers,
        peers: Peers,
        thresholds: Thresholds = Thresholds(),
    ) -> None:
        self._window_s = window_s
        self._expected = dict(expected)
        self._registry = registry
        self._served = served
        self._demand = demand
        self._followers = followers
        self.peers = peers
        self._thresholds = thresholds
        self._clock = asyncio.get_running_loop().time
        self._started = self._clock()
        self._classifier = False  # whether one has answered since the start: a cluster may have none
        self._left: set[str] = set()
        self._last: tuple[float, Verdict] | None = None
        registry.on_gone(self._gone)
        registry.on_change(lambda record, _: self._left.discard(record.instance_id))

    def verdict(self, policies: PolicySet) -> Verdict:
        """The present verdict; `policies` are those in force."""
        now = self._clock()
        if self._last is None or now - self._last[0] > FRESH_S:
            self._last = now, judge(self.situation(policies), self._thresholds)
        return self._last[1]

    def at_rest(self) -> bool:
        """Whether no request runs, all instances are ready, and gateways and schedulers are heard of: then the verdict
        changes slowly.
        """
        silent = (*self.peers.schedulers().values(), *self.peers.gateways().values())
        if max(silent, default=0.0) > _NEARLY * self._thresholds.gone_s:
            return False
        return all(one.state is InstanceState.READY and not one.load.inflight for one in self._registry.all())

    def situation(self, policies: PolicySet) -> Situation:
        now = time.time()
        window_s = now - window_begins(self._window_s, now)  # the window that is counted is the one that is named
        classes = self._served.window(self._window_s, now)
        late = self._followers.instances_behind(policies)
        ended = total(classes.values())
        return Situation(
            time_s=now,
            window_s=window_s,
            up_s=self._clock() - self._started,
            instances=tuple(_standing(record, late.get(record.instance_id, 0.0)) for record in self._registry.all()),
            expected={name: role for name, role in self._expected.items() if name not in self._left},
            classes=tuple(_class(slo, one) for slo, one in sorted(classes.items())),
            completed=ended.completed,
            cancelled=ended.cancelled,
            failed=ended.failures,
            refused=ended.refusals,
            placed=self._demand.placed(window_s),
            stages=_stages(ended),
            spent_s=ended.whole_s,
            transfers=ended.transfers,
            transfers_failed=ended.transfers_failed,
            transfer_bytes=ended.transfer_bytes,
            transfer_faults=ended.transfer_faults,
            gateways=tuple(Peer(name, silent_s) for name, silent_s in self.peers.gateways().items()),
            schedulers=self._schedulers(policies),
            predictions=self._predictions(ended.predicted),
        )

    def _gone(self, record: Record, *_: str) -> None:
        if record.instance_id in self._expected:  # other instances may come under ever new names
            self._left.add(record.instance_id)

    def _schedulers(self, policies: PolicySet) -> tuple[Peer, ...]:
        behind = self._followers.behind(policies)
        return tuple(
            Peer(name, silent_s, *behind.get(name, ("", 0.0))) for name, silent_s in self.peers.schedulers().items()
        )

    def _predictions(self, predicted: Mapping[str, int]) -> dict[str, int]:
        """Predictions by source. Without a classifier, observed lengths count as its predictions."""
        counts = Counter(predicted)
        self._classifier = self._classifier or counts["classifier"] > 0
        if not self._classifier:
            counts["classifier"] += counts.pop("observed", 0)
        return dict(counts)


def _standing(record: Record, behind_s: float) -> Standing:
    view, load = record.view(), record.load
    return Standing(
        record.instance_id,
        record.role,
        record.state,
        kv_used=kv_used(view) if load.time_s else None,
        running=load.running,
        waiting=load.waiting,
        importing=_importing(record),
        queued_prefill=load.queued_prefill,
        queue_s=queued_prefill_s(view),
        inflight=load.inflight,
        trouble=record.policies_trouble,
        behind_s=behind_s,
    )


def _importing(record: Record) -> int:
    """Of the waiting decodes, those that hold KV blocks already: their KV is on its way."""
    load = record.load
    if record.role is not Role.DECODE or not load.decoding:
        return 0
    mean = load.context_tokens / load.decoding
    without = round(load.waiting_tokens / mean) if mean else 0
    return max(0, load.waiting - without)


def _class(slo: str, one: Served) -> ClassSeen:
    number = one.completed  # failures are reported as such: their first token may have come in time
    if not number:
        return ClassSeen(slo)
    return ClassSeen(
        slo,
        number,
        ttft_met=one.ttft_met / number,
        tpot_met=one.tpot_met / number,
        ttft_target_s=one.ttft_target_s or None,
        tpot_target_s=one.tpot_target_s or None,
        stages=_stages(one),
        before_first=one.before_first,
        itl_met=one.itl_met / number if one.itl_target_s else None,
        itl_target_s=one.itl_target_s or None,
    )


def _stages(ended: Served) -> dict[Stage, StageSeen]:
    found = {}
    for stage in Stage:
        histogram = ended.stages.get(stage.value)
        if histogram:
            requests, seconds = sum(histogram.values()), ended.seconds[stage.value]
            found[stage] = StageSeen(requests, seconds, quantile(histogram, 0.5), quantile(histogram, 0.99))
    return found


_KINDS = {
    "predictor_fallback": (EventKind.PREDICTOR_FALLBACK, EventKind.PREDICTOR_RECOVERED),
    "gateway_gone": (EventKind.GATEWAY_GONE, EventKind.GATEWAY_RETURNED),
    "scheduler_gone": (EventKind.SCHEDULER_GONE, EventKind.SCHEDULER_RETURNED),
}


class Watch:
    """Logs an event when the verdict's level changes, and when a problem that no instance shows begins or ends.

    It looks at every `WORK`th step, in a cluster `at_rest` at every `REST`th, until something differs from what was
    logged.
    """

    def __init__(self, verdict: Callable[[], Verdict], at_rest: Callable[[], bool], events: Events) -> None:
        self._verdict = verdict
        self._at_rest = at_rest
        self._rested = 0  # steps since the last look
        self._events = events
        self._level = Level.GOOD
        self._problems: dict[str, str] = {}  # that were logged, with their texts
        self._differs: dict[str, int] = {}  # for how many looks something differs from what was logged

    def step(self) -> None:
        """Look, where it is time to; to be called every `PERIOD_S`."""
        self._rested += 1
        if not any(self._differs.values()) and (self._rested < WORK or (self._rested < REST and self._at_rest())):
            return
        self._rested = 0
        verdict = self._verdict()
        level = Level.GOOD if verdict.level is Level.IDLE else verdict.level
        if self._steady("level", differs=level is not self._level):
            self._level = level
            self._events.note(EventKind.VERDICT, verdict.headline)
        now = {problem.what: problem.text for problem in verdict.problems}
        for what, (begun, over) in _KINDS.items():
            if not self._steady(what, differs=(what in now) != (what in self._problems)):
                continue
            if what in now:
                self._problems[what] = now[what]
                self._events.note(begun, now[what])
            else:
                self._events.note(over, f"no longer: {self._problems.pop(what)}")

    def _steady(self, what: str, *, differs: bool) -> bool:
        looks = self._differs.get(what, 0) + 1 if differs else 0
        self._differs[what] = 0 if looks >= STEADY else looks
        return looks >= STEADY
