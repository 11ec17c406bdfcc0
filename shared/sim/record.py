"""What a run writes down: a row a request, and samples of the load."""

from collections.abc import Callable, Sequence

import numpy as np

from shared.domain.instance import InstanceState, InstanceView, Role
from shared.domain.job import JobView
from shared.sim.instance import SimInstance
from shared.sim.outcomes import LoadTimeline, Outcomes, Status
from shared.sim.request import LatePrediction, SimRequest
from shared.sim.spec import RunSpec
from shared.sim.workload import Workload

_PROGRESS_EVERY = 2000  # requests


class Record:
    """The workload read row by row, and the outcomes written row by row.

    `progress` is called now and then with the number of requests that have ended.
    """

    def __init__(self, workload: Workload, run: RunSpec, progress: Callable[[int], None] | None) -> None:
        self.outcomes = Outcomes.empty(workload)
        self._sent = 0
        self.count = len(workload)
        self.ended = 0
        self._run = run
        self._progress = progress
        self._prefixes = workload.prefixes
        self._mix = workload.mix
        # Lists: reading one number of an array costs several times as much.
        waited_s = run.prediction.answer_s if run.prediction and run.prediction.at_placement else 0.0
        self._gateway_s = run.gateway_s + waited_s
        self._arrival_s: list[float] = (workload.arrival_s + self._gateway_s).tolist()
        self._prompts: list[int] = workload.prompt_tokens.tolist()
        self._outputs: list[int] = workload.output_tokens.tolist()
        said = run.prediction.predict(workload.output_tokens, run.seed) if run.prediction else None
        self._buckets: list[int] | None = said.tolist() if said is not None else None

    def complete(self) -> bool:
        """Whether every request has ended."""
        return self.ended == self.count

    def arrival_s(self, row: int) -> float:
        """When the request is to be placed."""
        return self._arrival_s[row]

    def sent(self, row: int, now: float) -> float:
        """A client of a closed loop sends the request; when it is to be placed."""
        self._sent = row + 1
        self.outcomes.arrival_s[row] = now
        self._arrival_s[row] = now + self._gateway_s
        return self._arrival_s[row]

    def next_to_send(self) -> int | None:
        """The row that follows in a closed loop."""
        return self._sent if self._run.concurrency and self._sent < self.count else None

    def request(self, row: int) -> SimRequest:
        """The request of a row, as it sets out. It asks for as many tokens as it will get."""
        said, predictor = None, self._run.prediction
        if self._buckets is not None and predictor is not None:
            said = predictor.as_prediction(self._buckets[row])
        known = said if predictor is not None and predictor.at_placement else None
        output = self._outputs[row]
        asked = max(output, self._run.max_tokens or 0)
        prefix = self._prefixes[row] if self._prefixes is not None else ()
        mix, slo, caller = self._mix, self._run.slo, ""
        if mix is not None:
            slo, caller = mix.classes[mix.class_of[row]], mix.callers[mix.caller_of[row]]
        job = JobView(str(row), self._prompts[row], asked, slo, known, prefix=prefix, can_wait=True)
        request = SimRequest(row, job, output, prefix, float(self.outcomes.arrival_s[row]), caller)
        if said is not None and known is None and predictor is not None:
            request.late = LatePrediction(said, request.arrived_s + predictor.answer_s)
        return request

    def output_tokens(self, row: int) -> int:
        """Of the request of that row, in all."""
        return self._outputs[row]

    def first_token(self, request: SimRequest, now: float) -> None:
        """The client has its first token."""
        self.outcomes.first_token_s[request.row] = now + self._run.token_s

    def transferred(self, request: SimRequest, now: float) -> None:
        """All of its KV is at the decode instance."""
        self.outcomes.transfer_s[request.row] = max(0.0, now - request.prefill_done_s)

    def preempted(self, request: SimRequest) -> None:
        """It lost its blocks once more."""
        self.outcomes.preemptions[request.row] += 1

    def end(self, request: SimRequest, status: Status, now: float) -> None:
        """It is over."""
        rows, row = self.outcomes, request.row
        self.ended += 1
        if self._progress is not None and self.ended % _PROGRESS_EVERY == 0:
            self._progress(self.ended)
        rows.status[row] = int(status)
        if request.attempt > 1:
            rows.attempts[row] = request.attempt
        if status is not Status.COMPLETED:
            return
        rows.last_token_s[row] = now + self._run.token_s
        if rows.output_tokens[row] > 1:
            rows.longest_gap_s[row] = request.longest_gap_s
            rows.gaps_over[row] = request.gaps_over
        rows.split_tokens[row] = request.split
        computed = request.decode if request.prefill is None else request.prefill
        if computed is not None:
            rows.prefill_instance[row] = computed
        if request.decode is not None:
            rows.decode_instance[row] = request.decode


class Sampler:
    """Samples of all instances."""

    def __init__(self, instances: Sequence[SimInstance]) -> None:
        self._instances = instances
        self._time_s: list[float] = []
        self._role: list[list[int]] = []
        self._decoding: list[list[int]] = []
        self._queued: list[list[int]] = []
        self._kv_share: list[list[float]] = []

    def take(self, now: float) -> None:
        """One sample."""
        self._time_s.append(now)
        views = [instance.view(now) for instance in self._instances]
        self._role.append([-1 if v.state is InstanceState.DEAD else int(v.role is Role.DECODE) for v in views])
        self._decoding.append([view.load.decoding for view in views])
        self._queued.append([view.load.queued_prefill_tokens for view in views])
        self._kv_share.append([_kv_share(view) for view in views])

    def timeline(self) -> LoadTimeline:
        """All samples."""
        return LoadTimeline(
            time_s=np.array(self._time_s, dtype=np.float64),
            role=np.array(self._role, dtype=np.int8),
            decoding=np.array(self._decoding, dtype=np.int32),
            queued_prefill_tokens=np.array(self._queued, dtype=np.int64),
            kv_share=np.array(self._kv_share, dtype=np.float32),
        )


def _kv_share(view: InstanceView) -> float:
    """Share of the KV memory that is held; an instance that is gone holds nothing."""
    if view.state is InstanceState.DEAD:
        return 0.0
    return 1.0 - view.load.free_blocks / view.info.total_blocks
