"""The SLO cost of serving a job on given instances: one estimate for placement, split, dispatch and overload control.

The estimate rests on measured step times (`StepRates`), link rates, and the loads of the last broadcast; times are
seconds, lengths tokens. A `PrefillSide` and a `DecodeSide` hold what does not depend on the split. `pair` and `local`
combine them into an `Option`, whose cost has these terms: the job's own TTFT and time per token over their targets, and
for other requests the same as far as the job changes it. `options` lists the options worth considering.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, inf, log
from operator import attrgetter
from random import Random

import msgspec

from shared.domain.estimated import Estimated, RouteKind
from shared.domain.instance import InstanceView
from shared.domain.job import FirstTokenOut, JobView, Slo
from shared.domain.rates import UNKNOWN_STEPS, StepForm
from shared.policy.aging import share_left
from shared.policy.codec import choose_codec
from shared.policy.decode_admission import fits_after, takes_tokens, with_job
from shared.policy.ledger import Kept, WorkloadLedger
from shared.policy.output_lengths import Lengths
from shared.policy.split import Split
from shared.policy.step_budget import MARGIN, StepLoad, gap_target_s, prefill_tokens
from shared.policy.truth import DOUBT, EstimateErrors, What

ENDLESS = 1 << 30
SLOWNESS, LATENESS = 0.1, 0.1  # cost of each target's length of time, and of each one beyond the target
LEAST_POWER = 1.5  # of the miss probability, where estimates are off by most of the time that they predict
EVEN = 1e-6  # cost of full memory: of instances that are alike otherwise, the emptier one gets the job
HOLD_S = 0.02  # a shorter wait for KV memory is not worth holding the job in the gateway
HANDOVER_S = 0.1  # the gap between two tokens of an answer that migrates
KEEP_BUSY = 0.7  # a prefill instance that spends a larger share of its time on prompts keeps no further answers
KEPT_LENGTHS = 2.0  # expected lengths of an answer that a prefill instance decodes at most
BUSIEST = 0.95  # a busier instance counts as this busy: its queue does not grow without end
ROUNDING = 1e-9  # by which sums in another order may differ


def slo_cost(share: float) -> float:
    """The cost of a time that is expected to be `share` of its target: how likely the target is missed, and a little
    for being slow at all.

    A target that is missed for certain costs little more for one more delay, so that delays are not spread over
    requests that can still meet theirs; where all miss, what is left to save is time.
    """
    if share <= 0.0:
        return 0.0
    square = share * share  # `miss_probability`, inlined: a decision evaluates the cost some fifty times
    power = square * square
    late = LATENESS * (share - 1.0) if share > 1.0 else 0.0
    return power / (1.0 + power) + SLOWNESS * share + late


def doubtful_cost(share: float, factor: float) -> float:
    """`slo_cost` of a time whose estimates are off by that factor: the less is known of it, the less it decides.

    The exponent 4 of the miss probability falls with the logarithm of a factor over `DOUBT`, to at least `LEAST_POWER`.
    """
    if factor <= DOUBT or share <= 0.0:
        return slo_cost(share)
    power: float = share ** max(LEAST_POWER, 4.0 * log(DOUBT) / log(factor))
    late = LATENESS * (share - 1.0) if share > 1.0 else 0.0
    return power / (1.0 + power) + SLOWNESS * share + late


def miss_probability(share: float) -> float:
    """How likely a time that is expected to be `share` (at least 0) of its target misses it.

    Source: ours. Log-logistic, x^4 / (1 + x^4), as if estimates were off by a third either way; 0.5 at the target.
    """
    square = share * share
    power = square * square
    return power / (1.0 + power)


@dataclass(slots=True)
class JobContext:
    """A job, and what an estimate needs to know of it besides the instances.

    own, usual: lengths of its answer, and of answers in general; those that run are the longer ones. others: the class
    by which the cost to other requests is judged. bound: tokens of its answer for which room is kept; 0: its
    max_tokens. spread_s: seconds over which the decodes that are bound to instances arrive. limited: steps keep to the
    targets of the streams in them. kept: by instance, room for jobs that have been held for longer (`ledger.Claims`).
    now: unix seconds, of the decision; 0: not known. errors: of earlier estimates; None: not known. weight: of the cost
    to others, in units of the job's own cost.
    """

    job: JobView
    own: Lengths
    usual: Lengths
    others: Slo
    bound: int = 0
    spread_s: float = 0.0
    limited: bool = False
    kept: Mapping[str, Kept] = field(default_factory=dict)
    now: float = 0.0
    errors: EstimateErrors | None = None
    weight: float = field(init=False)
    certain: bool = field(init=False)  # no estimate is known to be far off: costs of times are plain `slo_cost`s
    gap_s: float = field(init=False)  # of `others`, where a step yields one token

    def __post_init__(self) -> None:
        self.weight = self.others.weight / self.job.slo.weight
        self.gap_s = gap_target_s(self.others)
        self.certain = self.errors is None or not self.errors.doubtful

    @classmethod
    def learned(
        cls, job: JobView, ledger: WorkloadLedger, now: float, *, limited: bool, spread_s: float = 0.0
    ) -> "JobContext":
        """With what a scheduler has learned from its earlier placements."""
        answers = ledger.output_lengths
        return cls(
            job,
            own=answers.expected(job),
            usual=answers.all,
            others=ledger.class_demand.others(job.slo, now),
            bound=answers.bound(job),
            spread_s=spread_s,
            limited=limited,
            kept=ledger.claims.before(job, now),
            now=now,
            errors=ledger.errors,
        )


class Pull(msgspec.Struct, frozen=True, gc=False):
    """The KV of the first `tokens` of the prompt, pulled from the prefix cache of an instance that holds it."""

    holder: InstanceView
    tokens: int
    lacks: int  # of these, the tokens that the puller does not hold itself, which are sent
    ready_s: float  # from now until they are at the puller; the job waits in its queue meanwhile
    others: float  # cost to the requests at the holder


class Part(msgspec.Struct, frozen=True, gc=False):
    """The first `tokens` of a prompt on a prefill instance, and their cost there."""

    tokens: int
    ready_s: float  # from now until they are computed, the queue included
    begins_s: float  # from now until the first chunk is computed, when a decode instance may allocate blocks for all
    last_share: float  # of the tokens, computed in the last chunk
    others: float  # cost to the requests behind the job, and to those at the holder of what it pulls
    pull: Pull | None = None


class PrefillSide:
    """An instance that would compute the prompt or its first part: its queue, and the cost of a token there.

    `saved` tokens of the prompt are in its prefix cache; it loads the last `loaded` of these from its host memory.
    pull: what it could pull, and is considered.
    """

    __slots__ = (
        *("_kv_bytes", "chunk", "form", "instance_id", "jobs", "load_token_s", "loaded", "pull", "saved", "sends_s"),
        *("view", "wait_s"),
    )

    def __init__(self, view: InstanceView, saved: int = 0, loaded: int = 0) -> None:
        info, load = view.info, view.load
        self.loaded, self.load_token_s = loaded, info.rates.host_token_s
        form, link = (info.rates.step or UNKNOWN_STEPS).prefill, info.rates.link
        self.view, self.instance_id, self.saved = view, info.instance_id, saved
        self.form, self.chunk = form, max(1, info.chunk_size)
        self.jobs = load.queued_prefill
        queued = load.queued_prefill_tokens
        mean = queued / max(1, self.jobs)
        self.wait_s = queued * (form.token_s + form.position_s * mean / 2.0 + form.fixed_s / self.chunk)
        self.sends_s = load.staged_bytes / link.bytes_s if link is not None else 0.0  # what it holds for others
        self.pull: Pull | None = None
        self._kv_bytes = -1.0

    @property
    def kv_bytes(self) -> float:
        """Bytes of KV of a token."""
        if self._kv_bytes < 0.0:
            self._kv_bytes = self.view.info.kv_bytes_per_token
        return self._kv_bytes

    def own_s(self, tokens: int, saved: int | None = None) -> float:
        """Seconds to compute the first `tokens` of the prompt, without the queue. saved: those that it has then; None:
        those that it has now.
        """
        form, chunk = self.form, self.chunk
        if saved is None:
            saved = self.saved
        if saved >= tokens:
            saved = tokens - 1
        fresh = tokens - saved
        # Behind others, a prompt's last chunk shares its step with the next prompt's first.
        steps = (fresh / chunk if fresh > chunk else 1.0) if self.jobs else -(-fresh // chunk)
        own_s = form.fixed_s * steps + fresh * (form.token_s + form.position_s * (saved + fresh / 2.0))
        return own_s + self.loading_s(tokens) if self.loaded else own_s

    def loading_s(self, tokens: int) -> float:
        """Seconds to load what the instance has of the first `tokens` in host memory."""
        return self.load_token_s * max(0, min(tokens, self.saved) - (self.saved - self.loaded))

    def part(self, tokens: int, others: Slo, pull: Pull | None = None) -> Part:
        """The first `tokens` of the prompt. As many requests as are queued now are taken to arrive behind the job."""
        wait_s, target, chunk = self.wait_s, others.ttft_s, self.chunk
        saved = self.saved if pull is None else pull.tokens
        own_s = self.own_s(tokens, saved)
        ready_s = wait_s + own_s
        cost = self.jobs * (slo_cost(ready_s / target) - slo_cost(wait_s / target)) if self.jobs else 0.0
        if pull is not None:
            cost += pull.others
            if pull.ready_s > wait_s:  # the requests behind it do not wait for what it pulls
                wait_s = pull.ready_s
                ready_s = wait_s + own_s
        begins_s = ready_s if tokens <= chunk else wait_s + self.own_s(chunk, saved)
        return Part(tokens, ready_s, begins_s, chunk / tokens if chunk < tokens else 1.0, cost, pull)


def mean_wait_s(prefills: Sequence[PrefillSide]) -> float:
    """Seconds until the queued prompts are computed, on average over the jobs in the queues."""
    jobs = sum(side.jobs for side in prefills)
    return sum(side.jobs * side.wait_s for side in prefills) / jobs if jobs else 0.0


class DecodeTerms(msgspec.Struct, frozen=True, gc=False):
    """What a decode instance would mean for the job and its other requests."""

    rest_s: float  # until its part of the prompt is computed, queue included; 0 without one
    tpot_s: float  # the job's own
    others: float  # cost to the requests that decode and are queued there, and to those at the holder of what it pulls
    memory: float  # cost of too little room
    room_s: float  # until there is room for the job's prompt
    pull: Pull | None = None


# Of a decode instance: its decodes, their context, and the tokens for which there is room.
_Occupancy = tuple[int, float, float]


class DecodeSide:
    """An instance that would decode the job and may compute the rest of its prompt: what does not depend on how much.

    `saved` tokens of the prompt are in its prefix cache; it loads the last `loaded` of these from its host memory,
    which takes `load_s`. mixed: share of the coming steps that compute prompts; None: estimated from the last steps and
    the queue. pull: what it could pull if it computes the whole job, and is considered.
    """

    __slots__ = (
        *("after_s", "alone_s", "behind_s", "beside_s", "budget", "chunk_s", "context", "cost_now", "form", "full_s"),
        *("gain", "inbound_s", "link", "load_s", "loaded", "memory", "mixed", "over", "pull", "queued_jobs", "room_s"),
        *("running", "running_context", "saved", "step_s", "token_s", "view", "wait_s"),
    )

    def __init__(
        self, view: InstanceView, context: JobContext, saved: int = 0, mixed: float | None = None, loaded: int = 0
    ) -> None:
        job, own, usual, slo = context.job, context.own, context.usual, context.others
        info, load, prompt = view.info, view.load, job.prompt_tokens
        rates, link = info.rates.step or UNKNOWN_STEPS, info.rates.link
        token, seats = rates.per_token, info.max_seqs or ENDLESS
        self.view, self.context, self.saved, self.link = view, context, saved, link
        self.loaded, self.load_s = loaded, info.rates.host_token_s * loaded
        self.pull: Pull | None = None
        self.inbound_s = load.inbound_bytes / link.bytes_s if link is not None else 0.0  # KV on its way to it
        self.queued_jobs = load.queued_prefill

        decoding, taken, free = _occupancy(view, seats, token, usual.mean, context.spread_s)
        self.running = running = decoding if decoding < seats else seats
        self.over = decoding - running  # decodes that wait for a seat
        self.running_context = running_context = taken * running / decoding if running else 0.0

        # A token of the decodes that run there, without and with the job among them; a step may yield several.
        now_s = token.fixed_s + token.sequence_s * running + token.context_s * running_context if running else 0.0
        self.step_s = step_s = now_s * rates.gain
        self.after_s = now_s  # where all seats are taken, the job takes the seat of a decode that ends
        if running < seats:
            longer = running_context + prompt + own.mean / 2.0
            self.after_s = token.fixed_s + token.sequence_s * (running + 1) + token.context_s * longer
        self.alone_s = token.fixed_s + token.sequence_s + token.context_s * (prompt + own.mean / 2.0)

        # A step that computes prompts beside the decodes: `budget` prompt tokens take `token_s` each.
        self.form = form = rates.mixed if running else rates.prefill
        budget = info.chunk_size - running
        if budget < 1:
            budget = 1
        self.gain = gain = rates.gain
        self.chunk_s = chunk_s = form.fixed_s + form.sequence_s * running + form.context_s * running_context
        full_s = chunk_s + budget * (form.token_s + form.position_s * (prompt + budget) / 2.0)
        gap_s = context.gap_s if gain == 1.0 else gap_target_s(slo, gain)
        if context.limited and full_s > MARGIN * gap_s:
            budget = prefill_tokens(rates, StepLoad(running, running_context, gap_s), budget)
            full_s = chunk_s + budget * (form.token_s + form.position_s * (prompt + budget) / 2.0)
        self.budget, self.full_s, self.token_s = budget, full_s, full_s / budget
        queued_steps = load.queued_prefill_tokens / budget
        if mixed is None:
            mixed = max(load.prefill_share, min(1.0, queued_steps / own.brief)) if queued_steps else load.prefill_share
        self.wait_s, self.mixed = queued_steps * full_s, mixed  # until the queued prompts are computed
        # A token's share of what prompts add to steps.
        self.beside_s = mixed * (full_s - step_s) / gain if full_s > step_s else 0.0
        self.cost_now = slo_cost((now_s + self.beside_s) / slo.tpot_s) if running else 0.0  # of each decode there

        # Room: `room_s` until there is room for the job's KV to its end, and a seat; `behind_s` by which those who wait
        # for room wait longer; `memory` the cost of memory that is promised twice.
        takes, fits_s = takes_tokens(view, prompt, saved) if saved > 0 else prompt, 0.0
        self.room_s = self.behind_s = 0.0
        self.memory = EVEN * load.kv_used_share(info.total_blocks)
        kept: Kept = context.kept.get(info.instance_id, ()) if context.kept else ()
        if load.kv_ahead or kept:
            fits_s = self.after_s * _steps_until_it_fits(view, takes, context.bound or job.max_tokens, kept)
        if kept:
            decoding, free = decoding + len(kept), free - sum(tokens for tokens, _ in kept)
        if fits_s > 0.0 or takes + own.mean > free or decoding >= seats:
            room_s, self.behind_s, memory = self._room((decoding, taken, free), seats, takes)
            self.room_s, self.memory = max(fits_s, room_s), memory + self.memory

    def _room(self, occupancy: _Occupancy, seats: int, takes: int) -> tuple[float, float, float]:
        """The wait for a seat and for KV memory, by how much it makes others wait, and the cost of preemptions."""
        (decoding, context, free), form, token_s = occupancy, self.form, self.after_s
        output, typical, target_s = self.context.own.mean, self.context.usual.mean, self.context.others.tpot_s
        short, over = takes + output - free, decoding + 1 - seats
        stay_s = typical * token_s  # of a request that decodes there
        room_s = memory = behind_s = 0.0
        if over > 0:
            behind_s = stay_s / seats
            room_s = over * behind_s
        if short > 0:
            release_s = stay_s / max(1.0, context)  # until a token of KV becomes free
            mean = context / decoding if decoding else takes
            redo_s = -(-mean // self.budget) * form.fixed_s + mean * form.token_s + short * release_s
            memory = min(1.0, short / max(1.0, mean)) * slo_cost((token_s + redo_s / typical) / target_s)
            behind_s = max(behind_s, (takes + output) * release_s)
            room_s = max(room_s, (takes - free) * release_s)
        return room_s, behind_s, memory

    @property
    def mixed_s(self) -> float:
        """Seconds of a step that computes prompts beside the decodes: of what is queued, or as much as of the job."""
        form, prompt = self.form, max(self.view.load.queued_prefill_tokens, self.context.job.prompt_tokens)
        chunk = min(self.budget, prompt)
        return max(self.step_s, self.chunk_s + chunk * (form.token_s + form.position_s * chunk / 2.0))

    @property
    def step_left_s(self) -> float:
        """Seconds until the step under way ends, on average, where no prompt is queued: a moment falls into a long step
        more often than into a short one.
        """
        step_s, share, mixed_s = self.step_s, self.mixed, self.mixed_s
        if self.wait_s > 0.0 or step_s <= 0.0:
            return 0.0
        mean_s = share * mixed_s + (1.0 - share) * step_s
        return (share * mixed_s * mixed_s + (1.0 - share) * step_s * step_s) / (2.0 * mean_s)

    def saved_beside(self, prefill: PrefillSide) -> int:
        """Of `saved`, what the job still has when it imports KV of that instance: nothing where their precisions
        differ, since the blocks of such KV are kept apart.
        """
        return self.saved if prefill.view.info.precision == self.view.info.precision else 0

    def terms(self, before: int, saved: int | None = None, pull: Pull | None = None) -> DecodeTerms:
        """With the first `before` prompt tokens computed elsewhere. saved: see `saved_beside`; None: all. pull: where
        nothing is computed elsewhere.
        """
        slo, usual = self.context.others, self.context.usual
        if saved is None:
            saved = self.saved
        load_s = self.load_s if saved else 0.0
        if pull is not None:
            saved = pull.tokens
        before = before if before > saved else saved
        rest = self.context.job.prompt_tokens - before
        others = rest_s = 0.0
        stall_s = load_s  # by which the decodes there are delayed
        if rest > 0:
            form, steps = self.form, -(-rest // self.budget)
            own_s = steps * self.chunk_s + rest * (form.token_s + form.position_s * (before + rest / 2.0)) + load_s
            stall_s = own_s - steps * self.step_s
            if stall_s < 0.0:
                stall_s = 0.0
            rest_s = self.wait_s + own_s
            if self.queued_jobs:
                others = self.queued_jobs * (slo_cost(rest_s / slo.ttft_s) - slo_cost(self.wait_s / slo.ttft_s))
            if pull is not None:
                others += pull.others
                if pull.ready_s > self.wait_s:
                    rest_s = pull.ready_s + own_s
        target, memory = slo.tpot_s, self.memory
        if self.running:
            longer_s = self.after_s + stall_s / usual.mean + self.beside_s
            others += self.running * (slo_cost(longer_s / target) - self.cost_now)
        if self.over:
            now_s, behind_s = self.after_s + self.room_s / usual.brief, self.behind_s + stall_s
            memory += self.over * (slo_cost((now_s + behind_s / usual.brief) / target) - slo_cost(now_s / target))
        return DecodeTerms(rest_s, self.after_s + self.beside_s, others, memory, self.room_s, pull)

    def beside_prompts(self) -> tuple[float, float]:
        """Seconds of a step that computes prompts beside the decodes with the job among them, and the factor by which
        a prompt token takes longer for it.
        """
        job, info = self.context.job, self.view.info
        rates, running = info.rates.step or UNKNOWN_STEPS, self.running + 1
        held = self.running_context + job.prompt_tokens + self.context.own.mean / 2.0
        budget, before = max(1, info.chunk_size - running), job.prompt_tokens / 2.0
        if self.context.limited:
            budget = prefill_tokens(rates, StepLoad(running, held, gap_target_s(job.slo, rates.gain)), budget)
        step_s = rates.mixed_s(budget, before, running, held)
        without_s = self.token_s if self.running else rates.prefill_s(info.chunk_size, before) / info.chunk_size
        return step_s, max(1.0, step_s / budget / without_s) if without_s > 0.0 else 1.0

    def own_s(self, tokens: int, saved: int | None = None) -> float:
        """Seconds to compute the first `tokens` of the prompt, without the queue. saved: those that it has then; None:
        those that it has now.
        """
        if saved is None:
            saved = self.saved
        return self._rest_s(saved, tokens - saved) + self.load_s

    def _rest_s(self, before: int, rest: int) -> float:
        """Seconds to compute `rest` tokens of the prompt after `before` others."""
        form = self.form
        chunks_s = -(-rest // self.budget) * self.chunk_s
        return chunks_s + rest * (form.token_s + form.position_s * (before + rest / 2.0))

    def transfer_s(self, prefill: PrefillSide, tokens: int) -> tuple[float, float]:
        """Seconds from now until a transfer of so many tokens could begin, and that it takes; 0 without a measured
        link.
        """
        link = self.link
        if link is None or tokens <= 0:
            return 0.0, 0.0
        waits_s = self.inbound_s if self.inbound_s > prefill.sends_s else prefill.sends_s
        job = self.context.job
        if job.slo.lossy_kv.lossy:
            left = max(0, tokens - prefill.chunk)  # the codec is chosen when the first chunk is computed
            return waits_s, choose_codec(job, tokens, left, prefill.view.info, self.view).moves_s
        bytes_s = link.slow.get(prefill.instance_id, link.bytes_s) if link.slow else link.bytes_s
        out = prefill.view.info.rates.link
        if out is not None and out.bytes_s < bytes_s:
            bytes_s = out.bytes_s
        return waits_s, tokens * prefill.kv_bytes / bytes_s + link.latency_s


def _occupancy(view: InstanceView, seats: int, token: StepForm, tokens: float, spread_s: float) -> _Occupancy:
    """By its load, less the decodes on their way that are not there at the same time.

    They arrive over `spread_s`, and the first of them have produced their `tokens` before the last arrive. Source:
    Little's law.
    """
    load = view.load
    free: float = load.free_blocks * view.info.block_size - load.waiting_tokens
    if spread_s <= 0.0 or not load.coming:
        return load.decoding, load.context_tokens, free
    running = min(load.decoding, seats)
    context = load.context_tokens * running / load.decoding
    token_s = token.fixed_s + token.sequence_s * running + token.context_s * context
    away = max(0.0, 1.0 - tokens * token_s / spread_s)
    away_tokens = away * load.coming_tokens
    return load.decoding - round(away * load.coming), load.context_tokens - away_tokens, free + away_tokens


def _steps_until_it_fits(view: InstanceView, prompt: int, answer: int, kept: Kept) -> float:
    """Steps until the instance has room for the job to the end of its answer, beside its decodes and the jobs for which
    room is kept.
    """
    size, ahead = view.info.block_size, view.load.kv_ahead
    room = view.info.total_blocks * size
    for tokens, answer_tokens in kept:
        ahead = with_job(ahead, tokens, answer_tokens, size)
    return fits_after(ahead, room, prompt, min(answer, max(1, room - prompt)), size)


class Option(msgspec.Struct, frozen=True, gc=False):
    """One way to serve the job, its predicted times and the terms of its cost.

    own_pause: cost of a pause between the first and the second token. hold_s: after which the job should begin, so that
    its KV finds room when it is computed.
    """

    total: float
    prefill: PrefillSide | None
    decode: DecodeSide
    part: Part | None
    terms: DecodeTerms
    ttft_s: float
    tpot_s: float
    own_ttft: float
    own_tpot: float
    own_pause: float
    others_link: float
    hold_s: float
    keep_tokens: int = 0  # of the answer, decoded by the prefill instance that computes the whole prompt

    @property
    def split(self) -> int:
        """Prompt tokens that the prefill instance computes."""
        return self.part.tokens if self.part is not None else 0

    @property
    def pull(self) -> Pull | None:
        """What the instance that computes the beginning of the prompt pulls."""
        return self.part.pull if self.part is not None else self.terms.pull

    @property
    def lead_steps(self) -> int:
        """Steps of the decode instance before it has to allocate blocks for the job's KV."""
        step_s = self.decode.after_s
        return int(self.part.begins_s / step_s) if self.part is not None and step_s > 0.0 else 0

    @property
    def has_room(self) -> bool:
        """Whether the job's KV finds room to the end of its answer when it reaches the decode instance."""
        return self.hold_s <= HOLD_S

    @property
    def kind(self) -> RouteKind:
        if self.pull is not None:
            return RouteKind.PULLED
        if self.keep_tokens:
            return RouteKind.KEPT
        if self.prefill is None:
            return RouteKind.WHOLE
        return RouteKind.FULL if self.split >= self.decode.context.job.prompt_tokens else RouteKind.SPLIT

    @property
    def estimated(self) -> Estimated:
        """What is predicted, before corrections by earlier outcomes: the computed times, less what the queues have lost
        since their loads were reported, with the rest of the step under way, and with shorter prompts beside the
        decodes where none are queued. Costs count none of these: goodput in simulations was lower with them.
        """
        side, prefill, kind, ttft_s, tpot_s = self.decode, self.prefill, self.kind, self.ttft_s, self.tpot_s
        decodes = computes = side.view.info.instance_id
        if prefill is not None:
            computes = prefill.instance_id
            if self.pull is None:
                ttft_s -= prefill.wait_s * (1.0 - share_left(prefill.view, side.context.now))
        if kind is not RouteKind.FULL and self.pull is None:
            ttft_s -= side.wait_s * (1.0 - share_left(side.view, side.context.now))
            ttft_s += side.step_left_s if prefill is None else 0.0
        if side.running and not self.keep_tokens:
            tpot_s -= side.mixed * max(0.0, side.full_s - side.mixed_s) / side.gain
        return Estimated(max(0.0, ttft_s), tpot_s, kind, computes, decodes)

    @property
    def figures(self) -> dict[str, float | str]:
        """The predicted times and the terms of the cost, for the reasons of a decision."""
        return {
            "ttft_s": round(self.ttft_s, 4),
            "tpot_s": round(self.tpot_s, 5),
            "harm": round(self.total, 6),
            "own_ttft": round(self.own_ttft, 6),
            "own_tpot": round(self.own_tpot, 6),
            "own_pause": round(self.own_pause, 6),
            "others_prefill": round(self.part.others if self.part is not None else 0.0, 6),
            "others_link": round(self.others_link, 6),
            "others_decode": round(self.terms.others, 6),
            "memory": round(self.terms.memory, 6),
        }


total_of = attrgetter("total")  # of an `Option`


def own_costs(context: JobContext, computes: str, decodes: str, ttft_s: float, tpot_s: float) -> tuple[float, float]:
    """The costs of the job's own times. computes, decodes: the instances by which they are estimated."""
    slo, errors = context.job.slo, context.errors
    ttft, tpot = ttft_s / slo.ttft_s, tpot_s / slo.tpot_s
    if context.certain:
        return slo_cost(ttft), slo_cost(tpot)
    assert errors is not None
    doubt = errors.doubt
    return doubtful_cost(ttft, doubt(What.TTFT, computes)), doubtful_cost(tpot, doubt(What.TPOT, decodes))


def local(decode: DecodeSide, terms: DecodeTerms) -> Option:
    """The decode instance computes the whole job; `terms` are those of `decode` with nothing computed elsewhere."""
    option = _local_below(decode, terms, inf)
    assert option is not None
    return option


def _local_below(decode: DecodeSide, terms: DecodeTerms, least: float) -> Option | None:
    """`local`; None where its total is not below that. With an infinite `least` there is always an option."""
    context, name, ttft_s = decode.context, decode.view.info.instance_id, terms.room_s + terms.rest_s
    own_ttft, own_tpot = own_costs(context, name, name, ttft_s, terms.tpot_s)
    total = own_ttft + own_tpot + context.weight * (terms.others + terms.memory)
    if total >= least < inf:
        return None
    return Option(
        total=total,
        prefill=None,
        decode=decode,
        part=None,
        terms=terms,
        ttft_s=ttft_s,
        tpot_s=terms.tpot_s,
        own_ttft=own_ttft,
        own_tpot=own_tpot,
        own_pause=0.0,
        others_link=0.0,
        hold_s=terms.room_s,
    )


def pair(prefill: PrefillSide, part: Part, decode: DecodeSide, terms: DecodeTerms) -> Option:
    """The prefill instance computes a part of the prompt, or all of it, and the decode instance the rest."""
    option = _pair_below(prefill, part, decode, terms, inf)
    assert option is not None
    return option


def _pair_below(
    prefill: PrefillSide, part: Part, decode: DecodeSide, terms: DecodeTerms, least: float
) -> Option | None:
    """`pair`; None where its total is not below that. With an infinite `least` there is always an option."""
    context = decode.context
    job, slo, others = context.job, context.job.slo, context.others
    ttft_s, tpot_s = part.ready_s, terms.tpot_s
    waits_s, moves_s = decode.transfer_s(prefill, part.tokens - decode.saved_beside(prefill))
    # Chunks are sent while the prompt is computed; the last one after it.
    ready_s = part.ready_s
    arrives_s = max(ready_s + moves_s * part.last_share, waits_s + moves_s)
    own_pause = link = 0.0
    hold_s = terms.room_s - part.begins_s
    if hold_s < 0.0:
        hold_s = 0.0
    if part.tokens >= job.prompt_tokens:
        pause_s = arrives_s - part.ready_s
        ttft_s += hold_s
        if slo.first_token is FirstTokenOut.SMOOTH:
            ttft_s += pause_s
        else:
            tpot_s += pause_s / context.own.brief
            own_pause = slo_cost(pause_s / slo.itl_s)
    else:
        ttft_s = max(arrives_s, terms.room_s) + terms.rest_s
    if waits_s > 0.0 and moves_s > 0.0:
        # As many transfers as wait for the same ports now wait for one more.
        brief = context.usual.brief
        now_s = tpot_s + waits_s / brief
        link = (
            waits_s / moves_s * (slo_cost((now_s + moves_s / brief) / others.tpot_s) - slo_cost(now_s / others.tpot_s))
        )
    own_ttft, own_tpot = own_costs(context, prefill.instance_id, decode.view.info.instance_id, ttft_s, tpot_s)
    cost_to_others = part.others + link + terms.others + terms.memory
    total = own_ttft + own_tpot + own_pause + context.weight * cost_to_others
    if total >= least < inf:
        return None
    return Option(
        total=total,
        prefill=prefill,
        decode=decode,
        part=part,
        terms=terms,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        own_ttft=own_ttft,
        own_tpot=own_tpot,
        own_pause=own_pause,
        others_link=link,
        hold_s=hold_s,
    )


def kept_options(best: Option) -> list[Option]:
    """Of a pair, the options in which the prefill instance decodes, too: to about the expected end of the answer, or
    until the decode instance is expected to have room. The rest of a longer answer migrates to that.

    Answers are taken to end at any token with the same probability. Source: ours; DynaServe and TaiChi split and mix
    likewise.
    """
    prefill, decode, context = best.prefill, best.decode, best.decode.context
    assert prefill is not None
    busy = prefill.view.load.busy_share
    if busy > KEEP_BUSY:
        return []
    side = DecodeSide(prefill.view, context, prefill.saved, busy, prefill.loaded)
    lengths = {ceil(KEPT_LENGTHS * context.own.mean)}
    if decode.room_s > HOLD_S and side.after_s > 0.0:
        lengths.add(ceil(decode.room_s / side.after_s))
    return [_kept(prefill, side, busy, best, tokens) for tokens in lengths]


def _kept(prefill: PrefillSide, side: DecodeSide, busy: float, best: Option, tokens: int) -> Option:
    context = side.context
    job, own, others = context.job, context.own, context.others
    pull = best.pull
    terms = side.terms(0, pull=pull)
    step_s, slower = side.beside_prompts()
    here_s = side.after_s + busy * max(0.0, step_s - side.after_s)
    over = exp(-tokens / own.mean) if tokens < job.max_tokens else 0.0  # how likely the answer is longer
    rest = best.terms
    ttft_s = terms.room_s + terms.rest_s
    tpot_s = (1.0 - over) * here_s + over * (rest.tpot_s + HANDOVER_S / own.brief)

    # The prompts that are queued there and that come while the job decodes take longer, each behind the ones before it.
    own_s = prefill.own_s(job.prompt_tokens)
    coming = prefill.jobs + busy * (1.0 - over) * own.mean * here_s / own_s
    more_s, then_s = (slower - 1.0) * own_s / (1.0 - min(busy, BUSIEST)), prefill.wait_s + own_s
    delayed = coming * (slo_cost((then_s + more_s) / others.ttft_s) - slo_cost(then_s / others.ttft_s))
    memory = rest.memory if tokens * here_s < rest.room_s else 0.0
    own_ttft, own_tpot = own_costs(context, prefill.instance_id, prefill.instance_id, ttft_s, tpot_s)
    cost_to_others = terms.others + terms.memory + delayed + over * (rest.others + memory)
    return Option(
        total=own_ttft + own_tpot + context.weight * cost_to_others,
        prefill=None,
        decode=side,
        part=None,
        terms=terms,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        own_ttft=own_ttft,
        own_tpot=own_tpot,
        own_pause=0.0,
        others_link=0.0,
        hold_s=terms.room_s,
        keep_tokens=tokens,
    )


def options(prefills: Sequence[PrefillSide], decodes: Sequence[DecodeSide]) -> list[Option]:
    """The options worth considering, without those of a kind that cost no less than one before them.

    They are: each decode instance with the whole prompt; each prefill instance with the whole prompt and the best
    decode instance, and the best prefill instance with each decode instance; and, for the most promising pairs, the
    balanced part. Sides that could pull a prefix count twice, with and without it.
    """
    local_options = _local_options(decodes)
    if not prefills:
        return local_options
    pairs = _whole_prompt_pairs(prefills, decodes)
    return [*local_options, *pairs, *_balanced_pairs(local_options, pairs)]


def _local_options(decodes: Sequence[DecodeSide]) -> list[Option]:
    """Each decode instance, if it costs less than those before it."""
    found: list[Option] = []
    best, weight = inf, decodes[0].context.weight
    for decode in decodes:
        ways = (None,) if decode.pull is None else (None, decode.pull)
        for pull in ways:
            terms = decode.terms(0, pull=pull)
            if weight * (terms.others + terms.memory) - ROUNDING > best:
                continue  # its cost to others alone is too high
            option = _local_below(decode, terms, best)
            if option is not None:
                found.append(option)
                best = option.total
    return found


def _whole_prompt_pairs(prefills: Sequence[PrefillSide], decodes: Sequence[DecodeSide]) -> list[Option]:
    """The first prefill instance with each decode instance, the others with the best of these: pairs that cost less
    than those before them.

    A pair is not computed when the part of its cost that does not depend on the link exceeds the best total so far.
    """
    context = decodes[0].context
    prompt, slo, weight, ttft_s = context.job.prompt_tokens, context.others, context.weight, context.job.slo.ttft_s
    parts = [(prefill, prefill.part(prompt, slo)) for prefill in prefills]
    parts += [(side, side.part(prompt, slo, side.pull)) for side in prefills if side.pull is not None]
    parts.sort(key=lambda one: one[1].ready_s + one[1].others * slo.ttft_s)
    (prefill, part), *others = parts
    (decode, terms), *more = [(decode, decode.terms(prompt)) for decode in decodes]
    best, partner = pair(prefill, part, decode, terms), (decode, terms)
    found, least, certain, tpot_s = [best], best.total, context.certain, context.job.slo.tpot_s
    surely = slo_cost(part.ready_s / ttft_s) + weight * part.others - ROUNDING
    for decode, terms in more:
        at_least = surely + weight * (terms.others + terms.memory)
        if at_least > least or (certain and at_least + slo_cost(terms.tpot_s / tpot_s) > least):
            continue
        option = _pair_below(prefill, part, decode, terms, least)
        if option is not None:
            found.append(option)
            least, partner = option.total, (decode, terms)
    decode, terms = partner
    surely = weight * (terms.others + terms.memory) - ROUNDING
    most = least - (slo_cost(terms.tpot_s / tpot_s) if certain else 0.0)
    for prefill, part in others:
        if slo_cost(part.ready_s / ttft_s) + weight * part.others + surely <= most:
            option = _pair_below(prefill, part, decode, terms, least)
            if option is not None:
                found.append(option)
                least = option.total
    return found


def _balanced_pairs(local_options: Sequence[Option], pairs: Sequence[Option]) -> list[Option]:
    """The balanced part on the best prefill instance, with the best decode instance of either list."""
    best, found = pairs[-1], []
    prefill, pull, prompt = best.prefill, best.pull, best.decode.context.job.prompt_tokens
    assert prefill is not None
    partners = {id(one.decode): one.decode for one in (min(local_options, key=total_of), best)}
    for decode in partners.values():
        split = balanced(prompt, prefill, decode, pull)
        if 0 < split < prompt:
            terms = decode.terms(split, decode.saved_beside(prefill))
            pulls = pull if pull is not None and pull.tokens < split else None
            found.append(pair(prefill, prefill.part(split, decode.context.others, pulls), decode, terms))
    return found


def balanced(prompt: int, prefill: PrefillSide, decode: DecodeSide, pull: Pull | None = None) -> int:
    """The split for which both sides take about as long, their queues included. Source: Cronus 4.2, in closed form."""
    each_s = prefill.own_s(prompt, pull.tokens if pull is not None else None) / prompt
    split = (decode.wait_s - prefill.wait_s + prompt * decode.token_s) / (each_s + decode.token_s)
    return max(0, min(prompt, round(split)))


def fixed_split_options(
    split: Split, prefills: Sequence[PrefillSide], decodes: Sequence[DecodeSide], rng: Random
) -> list[Option]:
    """The option of each pair that a fixed split policy leaves."""
    found = []
    for prefill in prefills:
        for decode in decodes:
            context = decode.context
            tokens = split.choose(context.job, prefill.view, decode.view, rng).tokens
            if tokens > 0:
                terms = decode.terms(tokens, decode.saved_beside(prefill))
                found.append(pair(prefill, prefill.part(tokens, context.others), decode, terms))
                if prefill.pull is not None and prefill.pull.tokens < tokens:
                    found.append(pair(prefill, prefill.part(tokens, context.others, prefill.pull), decode, terms))
            else:
                found.append(local(decode, decode.terms(0)))
                if decode.pull is not None:
                    found.append(local(decode, decode.terms(0, pull=decode.pull)))
    return found
