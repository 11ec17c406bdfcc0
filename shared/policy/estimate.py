"""What a job would meet on a pair of instances, and what it would do to those that are there: one estimate for all.

Everything in seconds and tokens, from measured step times (`StepRates`) and the loads of the last broadcast. Terms:
own first token and own time per token, each over its target; the same of others, as far as the job changes them.
"""

from typing import NamedTuple

from shared.domain.instance import InstanceView
from shared.domain.job import JobView, Slo
from shared.domain.rates import UNKNOWN_STEPS, StepRates
from shared.policy.answers import Lengths

STEEPNESS = 4.0
SLOWNESS = 0.02
ENDLESS = 1 << 30


def harm(share: float) -> float:
    """How likely a target is missed by a time that is expected to be `share` of it; and a little for being slow at all.

    Ours: log-logistic, x^4 / (1 + x^4), as if estimates were off by a third either way; 0.5 at the target itself. What
    is missed for certain is hardly worse for one more delay, so that harm is not spread over those who can be spared.
    """
    if share <= 0.0:
        return 0.0
    power: float = share**STEEPNESS
    return power / (1.0 + power) + SLOWNESS * share


class PrefillSide(NamedTuple):
    """An instance that would compute a prompt, or its first part: its queue, and what a token adds to it."""

    view: InstanceView
    rates: StepRates
    chunk: int
    wait_s: float
    jobs: int
    saved: int  # of the job's prompt, what its prefix cache holds

    @classmethod
    def of(cls, view: InstanceView, saved: int = 0) -> "PrefillSide":
        """As of its load; `saved` tokens of the job's prompt have their KV there."""
        rates, load, chunk = view.info.rates.step or UNKNOWN_STEPS, view.load, max(1, view.info.chunk_size)
        form = rates.prefill
        mean = load.queued_prefill_tokens / max(1, load.queued_prefill)
        token_s = form.token_s + form.position_s * mean / 2.0 + form.fixed_s / chunk
        return cls(view, rates, chunk, token_s * load.queued_prefill_tokens, load.queued_prefill, saved)

    def own_s(self, tokens: int) -> float:
        """Seconds to compute the first `tokens` of a prompt, once it is its turn."""
        form, saved = self.rates.prefill, min(self.saved, tokens - 1)
        fresh = tokens - saved
        steps = max(1.0, fresh / self.chunk)
        return form.fixed_s * steps + fresh * (form.token_s + form.position_s * (saved + fresh / 2.0))

    def harm(self, own_s: float, slo: Slo) -> float:
        """To those who come after: as many as wait now, each behind `own_s` more."""
        target = slo.ttft_s
        return self.jobs * (harm((self.wait_s + own_s) / target) - harm(self.wait_s / target))


def transfer_s(prefill: InstanceView, decode: InstanceView, tokens: int) -> tuple[float, float]:
    """Seconds from now until a transfer could begin, and that it takes. Nothing where nobody measured a link."""
    into = decode.info.rates.link
    if into is None:
        return 0.0, 0.0
    bytes_s, latency_s = into.from_s(prefill.info.instance_id), into.latency_s
    waits_s = decode.load.inbound_bytes / into.bytes_s
    out = prefill.info.rates.link
    if out is not None:
        waits_s = max(waits_s, prefill.load.staged_bytes / out.bytes_s)
        bytes_s, latency_s = min(bytes_s, out.bytes_s), max(latency_s, out.latency_s)
    return waits_s, tokens * prefill.info.kv_bytes_per_token / bytes_s + latency_s


def link_harm(waits_s: float, moves_s: float, tpot_s: float, brief: float, slo: Slo) -> float:
    """To those whose KV comes over the same ports later: as many as wait now, each behind one more."""
    if waits_s <= 0.0 or moves_s <= 0.0:
        return 0.0
    now_s = tpot_s + waits_s / brief
    return waits_s / moves_s * (harm((now_s + moves_s / brief) / slo.tpot_s) - harm(now_s / slo.tpot_s))


class DecodeTerms(NamedTuple):
    """What a decode instance would make of the job."""

    rest_s: float  # until its part of the prompt is computed, queue included; 0 when it has none
    tpot_s: float  # the job's own
    others: float  # harm to those who decode and wait there
    memory: float  # harm of too little room
    room_s: float  # until there is room for its prompt


class DecodeSide(NamedTuple):
    """An instance that would decode, and may compute the rest of the prompt."""

    view: InstanceView
    rates: StepRates
    budget: int  # prompt tokens of a step beside the decodes
    running: int  # decodes of a step
    context: float  # of those
    over: int  # decodes that wait for a seat
    seats: int  # decodes that run at once
    queued: int  # prompt tokens
    queued_jobs: int
    free: int  # tokens of KV that nobody holds or waits for
    step_s: float  # of the decodes there alone
    share: float  # of the steps that compute prompts, too
    saved: int  # of the job's prompt, what its prefix cache holds
    typical: float  # tokens of an answer, on average; those that run are the longer ones
    brief: float  # their harmonic mean: over which a wait is spread

    @classmethod
    def of(cls, view: InstanceView, usual: Lengths, saved: int = 0) -> "DecodeSide":
        """As of its load; `saved` tokens of the job's prompt have their KV there."""
        info, load = view.info, view.load
        rates = info.rates.step or UNKNOWN_STEPS
        decodes, context = load.decoding, load.context_tokens
        seats = info.max_seqs or ENDLESS
        running = min(decodes, seats)
        inside = context * running / decodes if decodes else 0.0
        return cls(
            view,
            rates,
            budget=max(1, info.chunk_size - running),
            running=running,
            context=inside,
            over=decodes - running,
            seats=seats,
            queued=load.queued_prefill_tokens,
            queued_jobs=load.queued_prefill,
            free=load.free_blocks * info.block_size - load.waiting_tokens,
            step_s=rates.decode_s(running, inside) if running else 0.0,
            share=load.prefill_share,
            saved=saved,
            typical=usual.mean,
            brief=usual.brief,
        )

    def terms(self, job: JobView, own: Lengths, before: int) -> DecodeTerms:
        """For a job whose first `before` prompt tokens are computed elsewhere, and that gives some `own` tokens."""
        prompt, rates, slo = job.prompt_tokens, self.rates, job.slo
        before = max(before, self.saved)
        rest = prompt - before
        full = self.running >= self.seats  # then it takes the place of one that ends
        after_s = self.step_s if full else rates.decode_s(self.running + 1, self.context + prompt + own.mean / 2.0)
        mixed_s = rates.mixed_s(self.budget, prompt / 2.0, self.running, self.context)
        queue_steps = self.queued / self.budget
        own_s = stall_s = rest_s = others = 0.0
        if rest > 0:
            own_s, stall_s = self._rest(rest, before)
            wait_s = queue_steps * mixed_s
            rest_s = wait_s + own_s
            if self.queued_jobs:
                others = self.queued_jobs * (harm((wait_s + own_s) / slo.ttft_s) - harm(wait_s / slo.ttft_s))
        beside_s = max(self.share, min(1.0, queue_steps / own.brief)) * max(0.0, mixed_s - self.step_s)
        target = slo.tpot_s
        longer_s = after_s + stall_s / self.typical
        others += self.running * (harm((longer_s + beside_s) / target) - harm((self.step_s + beside_s) / target))
        memory, room_s = self._room(prompt, own.mean, after_s, stall_s, target)
        return DecodeTerms(rest_s, after_s + beside_s, others, memory, room_s)

    def _rest(self, rest: int, before: int) -> tuple[float, float]:
        """Seconds of the steps that compute the last `rest` tokens, and how much longer they are than decodes alone."""
        form = self.rates.mixed if self.running else self.rates.prefill
        steps = -(-rest // self.budget)
        beside_s = form.fixed_s + form.sequence_s * self.running + form.context_s * self.context
        own_s = steps * beside_s + rest * (form.token_s + form.position_s * (before + rest / 2.0))
        return own_s, max(0.0, own_s - steps * self.step_s)

    def _room(self, prompt: int, output: float, step_s: float, stall_s: float, target_s: float) -> tuple[float, float]:
        """Harm of having too little memory or too few seats, and the wait of its own for both."""
        stay_s = self.typical * step_s  # of one that decodes there
        memory = room_s = behind_s = 0.0
        if self.over or self.running >= self.seats:
            behind_s = stay_s / self.seats
            room_s = (self.over + 1) * behind_s
        short = prompt + output - self.free
        if short > 0:
            release_s = stay_s / max(1.0, self.context)  # for a token of KV to become free
            mean = self.context / self.running if self.running else prompt
            form = self.rates.mixed
            redo_s = -(-mean // self.budget) * form.fixed_s + mean * form.token_s + short * release_s
            memory = min(1.0, short / max(1.0, mean)) * harm((step_s + redo_s / self.typical) / target_s)
            behind_s = max(behind_s, (prompt + output) * release_s)
            room_s = max(room_s, (prompt - self.free) * release_s)
        if self.over:
            now, behind_s = step_s + room_s / self.brief, behind_s + stall_s
            memory += self.over * (harm((now + behind_s / self.brief) / target_s) - harm(now / target_s))
        return memory, room_s
