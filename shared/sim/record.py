"""What a run writes down: a row a request."""

from shared.domain.job import JobView
from shared.sim.flight import Flight
from shared.sim.outcomes import Outcomes, Status
from shared.sim.spec import RunSpec
from shared.sim.workload import Workload


class Record:
    """The workload read row by row, and the outcomes written row by row."""

    def __init__(self, workload: Workload, run: RunSpec) -> None:
        self.outcomes = Outcomes.empty(workload)
        self._sent = 0
        self.count = len(workload)
        self.ended = 0
        self._run = run
        self._prefixes = workload.prefixes
        # Lists: reading one number of an array costs several times as much.
        self._arrival_s: list[float] = (workload.arrival_s + run.gateway_s).tolist()
        self._prompts: list[int] = workload.prompt_tokens.tolist()
        self._outputs: list[int] = workload.output_tokens.tolist()
        said = run.prediction.predict(workload.output_tokens, run.seed) if run.prediction else None
        self._buckets: list[int] | None = said.tolist() if said is not None else None

    @property
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
        self._arrival_s[row] = now + self._run.gateway_s
        return self._arrival_s[row]

    def next_to_send(self) -> int | None:
        """The row that follows in a closed loop."""
        return self._sent if self._run.concurrency and self._sent < self.count else None

    def flight(self, row: int) -> Flight:
        """The request of a row, as it sets out. It asks for as many tokens as it will get."""
        prediction = None
        if self._buckets is not None and self._run.prediction is not None:
            prediction = self._run.prediction.as_prediction(self._buckets[row])
        output = self._outputs[row]
        job = JobView(str(row), self._prompts[row], output, self._run.slo, prediction)
        return Flight(row, job, output, self._prefixes[row] if self._prefixes is not None else ())

    def first_token(self, flight: Flight, now: float) -> None:
        """The client has its first token."""
        self.outcomes.first_token_s[flight.row] = now + self._run.token_s

    def transferred(self, flight: Flight, now: float) -> None:
        """All of its KV is at the decode instance."""
        self.outcomes.transfer_s[flight.row] = max(0.0, now - flight.prefill_done_s)

    def preempted(self, flight: Flight) -> None:
        """It lost its blocks once more."""
        self.outcomes.preemptions[flight.row] += 1

    def end(self, flight: Flight, status: Status, now: float) -> None:
        """It is over."""
        rows, row = self.outcomes, flight.row
        self.ended += 1
        rows.status[row] = int(status)
        if flight.attempt > 1:
            rows.attempts[row] = flight.attempt
        if status is not Status.COMPLETED:
            return
        rows.last_token_s[row] = now + self._run.token_s
        rows.split_tokens[row] = flight.split
        if flight.prefill is not None:
            rows.prefill_instance[row] = flight.prefill.index
        elif flight.decode is not None:
            rows.prefill_instance[row] = flight.decode.index
        if flight.decode is not None:
            rows.decode_instance[row] = flight.decode.index
