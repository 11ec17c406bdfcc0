"""What a run reads and writes: the workload row by row, one outcome per request, and samples of the load."""

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
    """`progress` is called after every `_PROGRESS_EVERY` requests with the number of requests that have ended."""

    def __init__(self, workload: Workload, run: RunSpec, progress: Callable[[int], None] | None) -> None:
        self.outcomes = Outcomes.empty(workload)
        self.count = len(workload)
        self.ended = 0
        self._next = 0  # the row that a closed loop sends next
        self._run = run
        self._progress = progress
        self._prefixes = workload.prefixes
        self._answers = workload.answers
        self._sessions = workload.sessions if run.sessions else None
        self._mix = workload.mix
        prediction = run.prediction
        self._gateway_s = run.gateway_s + (prediction.answer_s if prediction and prediction.at_placement else 0.0)
        # Lists: reading one number of an array costs several times as much.
        self._placed_s: list[float] = (workload.arrival_s + self._gateway_s).tolist()
        self._prompts: list[int] = workload.prompt_tokens.tolist()
        self._outputs: list[int] = workload.output_tokens.tolist()
        self._buckets: list[int] = prediction.predict(workload.output_tokens, run.seed).tolist() if prediction else []

    @property
    def least_tpot_s(self) -> float:
        """The least target of all classes for the time per token."""
        classes = self._mix.classes if self._mix is not None else (self._run.slo,)
        return min(slo.tpot_s for slo in classes)

    def complete(self) -> bool:
        return self.ended == self.count

    def placement_s(self, row: int) -> float:
        return self._placed_s[row]

    def send(self, row: int, now: float) -> float:
        """A client of a closed loop sends the request at `now`; returns when it is to be placed."""
        self._next = row + 1
        self.outcomes.arrival_s[row] = now
        self._placed_s[row] = now + self._gateway_s
        return self._placed_s[row]

    def next_to_send(self) -> int | None:
        """The row that a closed loop sends next; None when there is none."""
        return self._next if self._run.concurrency and self._next < self.count else None

    def request(self, row: int) -> SimRequest:
        """The request of a row as it arrives. It asks for at least as many tokens as it will get."""
        prediction = self._run.prediction
        predicted = prediction.as_prediction(self._buckets[row]) if prediction else None
        known = predicted if prediction and prediction.at_placement else None
        output = self._outputs[row]
        max_tokens = max(output, self._run.max_tokens or 0)
        prefix = self._prefixes[row] if self._prefixes is not None else ()
        slo, caller = self._run.slo, ""
        if (mix := self._mix) is not None:
            slo, caller = mix.classes[mix.class_of[row]], mix.callers[mix.caller_of[row]]
        one = not slo.mixed_precision
        job = JobView(
            str(row),
            self._prompts[row],
            max_tokens,
            slo,
            known,
            prefix=prefix,
            can_wait=True,
            one_precision=one,
            migrates=self._run.migration,
            session=self._sessions[row] if self._sessions is not None else "",
        )
        request = SimRequest(row, job, output, prefix, float(self.outcomes.arrival_s[row]), caller)
        if self._answers is not None:
            request.answer = self._answers[row]
        if predicted is not None and known is None and prediction is not None:
            request.late = LatePrediction(predicted, request.arrived_s + prediction.answer_s)
        return request

    def output_tokens(self, row: int) -> int:
        return self._outputs[row]

    def first_token(self, request: SimRequest, now: float) -> None:
        self.outcomes.first_token_s[request.row] = now + self._run.token_s

    def transferred(self, request: SimRequest, now: float) -> None:
        """All KV of the request is at its decode instance."""
        self.outcomes.transfer_s[request.row] = max(0.0, now - request.prefill_done_s)

    def preempted(self, request: SimRequest) -> None:
        self.outcomes.preemptions[request.row] += 1

    def end(self, request: SimRequest, status: Status, now: float) -> None:
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
        if (estimated := request.estimated) is not None:
            rows.predicted_ttft_s[row] = request.placed_s - request.arrived_s + estimated.ttft_s
            rows.predicted_tpot_s[row] = estimated.tpot_s
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
    def __init__(self, instances: Sequence[SimInstance]) -> None:
        self._instances = instances
        self._time_s: list[float] = []
        self._samples: list[list[tuple[int, int, int, float]]] = []  # by instance, in the order of `LoadTimeline`

    def sample(self, now: float) -> None:
        self._time_s.append(now)
        self._samples.append([_numbers(instance.view(now)) for instance in self._instances])

    def timeline(self) -> LoadTimeline:
        samples = np.array(self._samples).reshape(-1, len(self._instances), 4)
        role, decoding, queued, kv_share = samples.transpose(2, 0, 1)
        return LoadTimeline(
            time_s=np.array(self._time_s, dtype=np.float64),
            role=role.astype(np.int8),
            decoding=decoding.astype(np.int32),
            queued_prefill_tokens=queued.astype(np.int64),
            kv_share=kv_share.astype(np.float32),
        )


def _numbers(view: InstanceView) -> tuple[int, int, int, float]:
    """Role, decodes, queued prompt tokens and share of the KV memory; a dead instance has the role -1 and no KV."""
    dead, load = view.state is InstanceState.DEAD, view.load
    role = -1 if dead else int(view.role is Role.DECODE)
    kv_share = 0.0 if dead else load.kv_used_share(view.info.total_blocks)
    return role, load.decoding, load.queued_prefill_tokens, kv_share
