"""What a job would meet on a pair of instances, and what it would do to those that are there: one estimate for all.

Everything in seconds and tokens, from measured step times (`StepRates`) and the loads of the last broadcast. Terms:
own first token and own time per token, each over its target; the same of others, as far as the job changes them.
"""

from collections.abc import Sequence
from random import Random

import msgspec

from shared.domain.instance import InstanceLoad, InstanceView
from shared.domain.job import FirstTokenOut, JobView, Slo
from shared.domain.rates import UNKNOWN_STEPS, LinkRate, StepForm
from shared.policy.answers import Lengths
from shared.policy.claims import Kept
from shared.policy.codec import choose_codec
from shared.policy.decode_admission import fits_after, takes_tokens, with_job
from shared.policy.harm import harm
from shared.policy.split import Split
from shared.policy.step_budget import MARGIN, StepLoad, gap_target_s, prefill_tokens

ENDLESS = 1 << 30
EVEN = 1e-6  # harm of full memory: of instances that are alike otherwise the emptier one takes the job


class Part(msgspec.Struct, frozen=True, gc=False):
    """The first `tokens` of a prompt on a prefill instance: what they cost there."""

    tokens: int
    ready_s: float  # from now until they are computed, the queue included
    begins_s: float  # until the first chunk is, when a decode instance may take blocks for all of them
    last_share: float  # of them, computed in the last chunk
    others: float  # harm to those who come after


class PrefillSide(msgspec.Struct, frozen=True, gc=False):
    """An instance that would compute a prompt, or its first part: its queue, and what a token adds to it."""

    view: InstanceView
    instance_id: str
    form: StepForm
    chunk: int
    wait_s: float
    jobs: int
    saved: int  # of the job's prompt, what its prefix cache holds
    kv_bytes: float  # of a token
    sends_s: float  # until it has sent what it holds for others

    @classmethod
    def of(cls, view: InstanceView, saved: int = 0) -> "PrefillSide":
        """As of its load; `saved` tokens of the job's prompt have their KV there."""
        info, load = view.info, view.load
        form, chunk, link = (info.rates.step or UNKNOWN_STEPS).prefill, max(1, info.chunk_size), info.rates.link
        queued = load.queued_prefill_tokens
        mean = queued / max(1, load.queued_prefill)
        wait_s = queued * (form.token_s + form.position_s * mean / 2.0 + form.fixed_s / chunk)
        sends_s = load.staged_bytes / link.bytes_s if link is not None else 0.0
        kv_bytes = info.kv_bytes_per_token
        return cls(view, info.instance_id, form, chunk, wait_s, load.queued_prefill, saved, kv_bytes, sends_s)

    def own_s(self, tokens: int) -> float:
        """Seconds to compute the first `tokens` of a prompt, once it is its turn."""
        form, chunk = self.form, self.chunk
        saved = self.saved if self.saved < tokens else tokens - 1
        fresh = tokens - saved
        # Behind others a prompt's last chunk shares its step with the next one's first.
        steps = (fresh / chunk if fresh > chunk else 1.0) if self.jobs else -(-fresh // chunk)
        return form.fixed_s * steps + fresh * (form.token_s + form.position_s * (saved + fresh / 2.0))

    def part(self, tokens: int, others: Slo) -> Part:
        """The first `tokens` of the prompt. Those who come after are as many as wait now, each behind so much more."""
        wait_s, target, chunk = self.wait_s, others.ttft_s, self.chunk
        ready_s = wait_s + self.own_s(tokens)
        harmed = self.jobs * (harm(ready_s / target) - harm(wait_s / target)) if self.jobs else 0.0
        begins_s = ready_s if tokens <= chunk else wait_s + self.own_s(chunk)
        return Part(tokens, ready_s, begins_s, chunk / tokens if chunk < tokens else 1.0, harmed)


def usual_wait_s(prefills: Sequence[PrefillSide]) -> float:
    """Seconds until what waits at prefill instances is computed, on average over the jobs that wait there."""
    jobs = sum(side.jobs for side in prefills)
    return sum(side.jobs * side.wait_s for side in prefills) / jobs if jobs else 0.0


def link_harm(waits_s: float, moves_s: float, tpot_s: float, brief: float, slo: Slo) -> float:
    """To those whose KV comes over the same ports later: as many as wait now, each behind one more."""
    if waits_s <= 0.0 or moves_s <= 0.0:
        return 0.0
    now_s = tpot_s + waits_s / brief
    return waits_s / moves_s * (harm((now_s + moves_s / brief) / slo.tpot_s) - harm(now_s / slo.tpot_s))


class DecodeTerms(msgspec.Struct, frozen=True, gc=False):
    """What a decode instance would make of the job."""

    rest_s: float  # until its part of the prompt is computed, queue included; 0 when it has none
    tpot_s: float  # the job's own
    others: float  # harm to those who decode and wait there
    memory: float  # harm of too little room
    room_s: float  # until there is room for its prompt


class DecodeSide(msgspec.Struct, frozen=True, gc=False):
    """An instance that would decode the job, and may compute the rest of its prompt: all that does not depend on how
    much that is.
    """

    view: InstanceView
    job: JobView
    slo: Slo  # by which harm to others is judged
    form: StepForm  # of steps that compute prompts
    budget: int  # prompt tokens of such a step beside the decodes
    running: int  # decodes of a step
    over: int  # decodes that wait for a seat
    queued_jobs: int  # whose prompts are to be computed there
    saved: int  # of the job's prompt, what its prefix cache holds
    usual: Lengths  # of answers; those that run are the longer ones
    link: LinkRate | None  # over which KV comes
    comes_s: float  # until what is on its way is there
    token_s: float  # of a prompt token in a full step beside the decodes
    step_s: float  # of the decodes there alone
    chunk_s: float  # of a step beside them, its prompt tokens left out
    after_s: float  # of a step of decodes with the job among them
    beside_s: float  # by which steps are longer, on average, for the prompts of others
    wait_s: float  # until the prompts that wait there are computed
    room_s: float  # until there is room for the job's KV to its end, and a seat
    behind_s: float  # by which those who wait for that, too, wait longer
    memory: float  # harm of what is promised twice
    alone_s: float  # of a step of the job's decode with nobody beside it
    harmed: float  # each of those that decode there, as it is

    @classmethod
    def of(
        cls,
        view: InstanceView,
        job: JobView,
        own: Lengths,
        usual: Lengths,
        saved: int = 0,
        others: Slo | None = None,
        spread_s: float = 0.0,
        limited: bool = False,
        mixed: float | None = None,
        bound: int = 0,
        kept: Kept = (),
    ) -> "DecodeSide":
        """As of its load. own: of the job's answer; `saved` tokens of its prompt have their KV there.

        others: the class of those that it would meet; its own if nobody says. spread_s: over which bound decodes come.
        bound: tokens of its answer for which room is kept; its max_tokens where it is not known. kept: room for
        jobs that have been held for longer (`shared.policy.claims`).
        limited: steps keep to the targets of those that decode. mixed: share of steps to come with prompts in
        them; as the last ones there, and its queue, say, if nobody says.
        """
        slo = job.slo if others is None else others
        info, load, prompt = view.info, view.load, job.prompt_tokens
        rates, link = info.rates.step or UNKNOWN_STEPS, info.rates.link
        seats, decode = info.max_seqs or ENDLESS, rates.decode
        held = decoding, taken, free = _held(view, seats, decode, usual.mean, spread_s)
        running = decoding if decoding < seats else seats
        context = taken * running / decoding if running else 0.0
        form = rates.mixed if running else rates.prefill
        step_s = decode.fixed_s + decode.sequence_s * running + decode.context_s * context if running else 0.0
        after_s = step_s  # where all seats are taken, it takes the place of one that ends
        if running < seats:
            longer = context + prompt + own.mean / 2.0
            after_s = decode.fixed_s + decode.sequence_s * (running + 1) + decode.context_s * longer
        budget = max(1, info.chunk_size - running)
        chunk_s = form.fixed_s + form.sequence_s * running + form.context_s * context
        full_s = chunk_s + budget * (form.token_s + form.position_s * (prompt + budget) / 2.0)
        if limited and full_s > MARGIN * (gap_s := gap_target_s(slo)):
            budget = prefill_tokens(rates, StepLoad(running, context, gap_s), budget)
            full_s = chunk_s + budget * (form.token_s + form.position_s * (prompt + budget) / 2.0)
        steps = load.queued_prefill_tokens / budget
        if mixed is None:
            mixed = max(load.prefill_share, min(1.0, steps / own.brief))
        beside_s = mixed * max(0.0, full_s - step_s)
        blocks = info.total_blocks
        room = 0.0, 0.0, EVEN * (1.0 - load.free_blocks / blocks if blocks else 0.0)
        takes, fits_s = takes_tokens(view, prompt, saved), 0.0
        if load.kv_ahead or kept:
            fits_s = after_s * _steps_until_it_fits(view, takes, bound or job.max_tokens, kept)
        if kept:
            held = decoding, taken, free = decoding + len(kept), taken, free - sum(tokens for tokens, _ in kept)
        if fits_s > 0.0 or takes + own.mean > free or decoding >= seats:
            room_s, behind_s, memory = _room(
                held, seats, form, takes, own.mean, usual.mean, budget, after_s, slo.tpot_s
            )
            room = max(fits_s, room_s), behind_s, memory + room[2]
        return cls(
            view,
            job,
            slo,
            form,
            budget,
            running,
            decoding - running,
            load.queued_prefill,
            saved,
            usual,
            link,
            load.inbound_bytes / link.bytes_s if link is not None else 0.0,
            full_s / budget,
            step_s,
            chunk_s,
            after_s,
            beside_s,
            steps * full_s,
            *room,
            decode.fixed_s + decode.sequence_s + decode.context_s * (prompt + own.mean / 2.0),
            harm((step_s + beside_s) / slo.tpot_s) if running else 0.0,
        )

    def terms(self, before: int) -> DecodeTerms:
        """With the first `before` prompt tokens computed elsewhere."""
        slo, usual = self.slo, self.usual
        before = before if before > self.saved else self.saved
        rest = self.job.prompt_tokens - before
        others = stall_s = rest_s = 0.0
        if rest > 0:
            form, steps = self.form, -(-rest // self.budget)
            own_s = steps * self.chunk_s + rest * (form.token_s + form.position_s * (before + rest / 2.0))
            stall_s = max(0.0, own_s - steps * self.step_s)
            rest_s = self.wait_s + own_s
            if self.queued_jobs:
                others = self.queued_jobs * (harm(rest_s / slo.ttft_s) - harm(self.wait_s / slo.ttft_s))
        target, memory = slo.tpot_s, self.memory
        if self.running:
            longer_s = self.after_s + stall_s / usual.mean + self.beside_s
            others += self.running * (harm(longer_s / target) - self.harmed)
        if self.over:
            now_s, behind_s = self.after_s + self.room_s / usual.brief, self.behind_s + stall_s
            memory += self.over * (harm((now_s + behind_s / usual.brief) / target) - harm(now_s / target))
        return DecodeTerms(rest_s, self.after_s + self.beside_s, others, memory, self.room_s)

    def transfer_s(self, prefill: PrefillSide, tokens: int) -> tuple[float, float]:
        """Seconds from now until a transfer could begin, and that it takes. Nothing where nobody measured a link."""
        link = self.link
        if link is None or tokens <= 0:
            return 0.0, 0.0
        waits_s = self.comes_s if self.comes_s > prefill.sends_s else prefill.sends_s
        if self.job.slo.lossy_kv.lossy:
            left = max(0, tokens - prefill.chunk)  # the codec is chosen when the first chunk is computed
            return waits_s, choose_codec(self.job, tokens, left, prefill.view.info, self.view).moves_s
        bytes_s = link.slow.get(prefill.instance_id, link.bytes_s) if link.slow else link.bytes_s
        out = prefill.view.info.rates.link
        if out is not None and out.bytes_s < bytes_s:
            bytes_s = out.bytes_s
        return waits_s, tokens * prefill.kv_bytes / bytes_s + link.latency_s


Held = tuple[int, float, float]  # at a decode instance: decodes, their context, and the tokens for which there is room


def _held(view: InstanceView, seats: int, decode: StepForm, tokens: float, spread_s: float) -> Held:
    """As of its load, without those on their way that are not there at a time."""
    load = view.load
    free = load.free_blocks * view.info.block_size - load.waiting_tokens
    if spread_s <= 0.0 or not load.coming:
        return load.decoding, load.context_tokens, free
    away = _away(load, seats, decode, tokens, spread_s)
    tokens_away = away * load.coming_tokens
    return load.decoding - round(away * load.coming), load.context_tokens - tokens_away, free + tokens_away


def _away(load: InstanceLoad, seats: int, decode: StepForm, tokens: float, spread_s: float) -> float:
    """Of the decodes on their way, the share that is not there at a time: they come over `spread_s`, and the first have
    given their `tokens` before the last have come. Source: Little's law.
    """
    running = min(load.decoding, seats)
    step_s = (
        decode.fixed_s + decode.sequence_s * running + decode.context_s * load.context_tokens * running / load.decoding
    )
    return max(0.0, 1.0 - tokens * step_s / spread_s)


def _steps_until_it_fits(view: InstanceView, prompt: int, answer: int, kept: Kept) -> float:
    """Steps until the instance has room for the job to the end of its answer, beside those that decode there and those
    for which room is kept.
    """
    size, ahead = view.info.block_size, view.load.kv_ahead
    room = view.info.total_blocks * size
    for tokens, left in kept:
        ahead = with_job(ahead, tokens, left, size)
    return fits_after(ahead, room, prompt, min(answer, max(1, room - prompt)), size)


def _room(
    held: Held,
    seats: int,
    form: StepForm,
    prompt: int,
    output: float,
    typical: float,
    budget: int,
    step_s: float,
    target_s: float,
) -> tuple[float, float, float]:
    """The wait for a seat and for KV memory, by how much it makes others wait, and the harm of preemptions."""
    decoding, context, free = held
    short, over = prompt + output - free, decoding + 1 - seats
    stay_s = typical * step_s  # of one that decodes there
    room_s = memory = behind_s = 0.0
    if over > 0:
        behind_s = stay_s / seats
        room_s = over * behind_s
    if short > 0:
        release_s = stay_s / max(1.0, context)  # for a token of KV to become free
        mean = context / decoding if decoding else prompt
        redo_s = -(-mean // budget) * form.fixed_s + mean * form.token_s + short * release_s
        memory = min(1.0, short / max(1.0, mean)) * harm((step_s + redo_s / typical) / target_s)
        behind_s = max(behind_s, (prompt + output) * release_s)
        room_s = max(room_s, (prompt - free) * release_s)
    return room_s, behind_s, memory


# MERGED options.py
# The ways in which a job can be served by a few candidates, and what each would come to.


HOLD_S = 0.02  # a wait for room that is not worth waiting for in the gateway: there is room
ROUNDING = 1e-9  # by which sums in another order may differ


class Option(msgspec.Struct, frozen=True, gc=False):
    """One way to serve the job, and what it would come to. In `total` harm to others counts by their weight.

    own_pause: harm of a pause between the first token and the second. begins_s: until its KV may take blocks. hold_s:
    after which the job should begin, so that its KV finds room when it is computed.
    """

    total: float
    prefill: PrefillSide | None
    decode: DecodeSide
    split: int
    ttft_s: float
    tpot_s: float
    own_ttft: float
    own_tpot: float
    own_pause: float
    begins_s: float
    hold_s: float
    others_prefill: float
    others_link: float
    others_decode: float
    memory: float


def options(job: JobView, own: Lengths, prefills: Sequence[PrefillSide], decodes: Sequence[DecodeSide]) -> list[Option]:
    """What there is to choose from: every decode instance with none of the prompt, each prefill instance with all of it
    and the best decode instance, the best one with each of these, and the balanced part for the most promising pairs.
    """
    prompt = job.prompt_tokens
    nones = _nones(job, decodes)
    if not prefills:
        return nones
    after = [(decode, decode.terms(prompt)) for decode in decodes]
    slo = decodes[0].slo
    parts = [(prefill, prefill.part(prompt, slo)) for prefill in prefills]
    parts.sort(key=lambda one: one[1].ready_s + one[1].others * slo.ttft_s)
    alls = _alls(job, own, parts, after)
    return [*nones, *alls, *_balanced(job, own, nones, alls)]


def _nones(job: JobView, decodes: Sequence[DecodeSide]) -> list[Option]:
    """None of the prompt: each decode instance, but for those whose harm to others is more than the best's in all."""
    found: list[Option] = []
    best, weight = float("inf"), decodes[0].slo.weight / job.slo.weight
    for decode in decodes:
        terms = decode.terms(0)
        if weight * (terms.others + terms.memory) - ROUNDING > best:
            continue
        option = local(job, decode, terms)
        found.append(option)
        best = min(best, option.total)
    return found


def _alls(
    job: JobView,
    own: Lengths,
    parts: Sequence[tuple[PrefillSide, Part]],
    after: Sequence[tuple[DecodeSide, DecodeTerms]],
) -> list[Option]:
    """All of the prompt: the first prefill instance with each decode instance, the others with the best of these.

    A pair is left out where what does not depend on the link is more than all of the best so far.
    """
    (prefill, part), *others = parts
    decode, terms = after[0]
    best, partner = pair(job, own, prefill, part, decode, terms), 0
    found, weight = [best], decode.slo.weight / job.slo.weight
    surely = harm(part.ready_s / job.slo.ttft_s) + weight * part.others - ROUNDING
    for at in range(1, len(after)):
        decode, terms = after[at]
        if surely + weight * (terms.others + terms.memory) > best.total:
            continue
        option = pair(job, own, prefill, part, decode, terms)
        found.append(option)
        if option.total < best.total:
            best, partner = option, at
    decode, terms = after[partner]
    harmed = weight * (terms.others + terms.memory) - ROUNDING
    for prefill, part in others:
        if harm(part.ready_s / job.slo.ttft_s) + weight * part.others + harmed <= best.total:
            found.append(pair(job, own, prefill, part, decode, terms))
    return found


def _balanced(job: JobView, own: Lengths, nones: Sequence[Option], alls: Sequence[Option]) -> list[Option]:
    """The balanced parts: of the best prefill instance with the best decode instances of either extreme."""
    best, found = min(alls, key=total_of), []
    partners = {id(one.decode): one.decode for one in (min(nones, key=total_of), best)}
    prefill = best.prefill
    assert prefill is not None
    for decode in partners.values():
        split = balanced(job.prompt_tokens, prefill, decode)
        if 0 < split < job.prompt_tokens:
            part, terms = prefill.part(split, decode.slo), decode.terms(split)
            found.append(pair(job, own, prefill, part, decode, terms))
    return found


def kept_to(
    split: Split,
    job: JobView,
    own: Lengths,
    prefills: Sequence[PrefillSide],
    decodes: Sequence[DecodeSide],
    now: float,
    rng: Random,
) -> list[Option]:
    """The options that a fixed policy for splits leaves."""
    found = []
    for prefill in prefills:
        for decode in decodes:
            tokens = split.choose(job, prefill.view, decode.view, now, rng).tokens
            if tokens > 0:
                part, terms = prefill.part(tokens, decode.slo), decode.terms(tokens)
                found.append(pair(job, own, prefill, part, decode, terms))
            else:
                found.append(local(job, decode, decode.terms(0)))
    return found


def balanced(prompt: int, prefill: PrefillSide, decode: DecodeSide) -> int:
    """The split for which both sides take about as long, their queues included. Source: Cronus 4.2, in closed form."""
    each_s = prefill.own_s(prompt) / prompt
    split = (decode.wait_s - prefill.wait_s + prompt * decode.token_s) / (each_s + decode.token_s)
    return max(0, min(prompt, round(split)))


def local(job: JobView, decode: DecodeSide, terms: DecodeTerms) -> Option:
    """The decode instance does it all; `terms` are those without a part computed elsewhere."""
    slo = job.slo
    ttft_s = terms.room_s + terms.rest_s
    own_ttft, own_tpot = harm(ttft_s / slo.ttft_s), harm(terms.tpot_s / slo.tpot_s)
    total = own_ttft + own_tpot + decode.slo.weight / slo.weight * (terms.others + terms.memory)
    return Option(
        total,
        None,
        decode,
        0,
        ttft_s,
        terms.tpot_s,
        own_ttft,
        own_tpot,
        0.0,
        0.0,
        terms.room_s,
        0.0,
        0.0,
        terms.others,
        terms.memory,
    )


def pair(
    job: JobView, own: Lengths, prefill: PrefillSide, part: Part, decode: DecodeSide, terms: DecodeTerms
) -> Option:
    """The prefill instance does a part of the prompt, or all of it, and the decode instance the rest."""
    slo, ttft_s, tpot_s = job.slo, part.ready_s, terms.tpot_s
    waits_s, moves_s = decode.transfer_s(prefill, part.tokens - decode.saved)
    # Chunks leave while the prompt is computed; the last one after it.
    arrives_s = max(part.ready_s + moves_s * part.last_share, waits_s + moves_s)
    own_pause = 0.0
    hold_s = max(0.0, terms.room_s - part.begins_s)
    if part.tokens >= job.prompt_tokens:
        pause_s = arrives_s - part.ready_s
        ttft_s += hold_s
        if slo.first_token is FirstTokenOut.SMOOTH:
            ttft_s += pause_s
        else:
            tpot_s += pause_s / own.brief
            own_pause = harm(pause_s / slo.itl_s)
    else:
        ttft_s = max(arrives_s, terms.room_s) + terms.rest_s
    link = link_harm(waits_s, moves_s, tpot_s, decode.usual.brief, decode.slo) if waits_s > 0.0 else 0.0
    own_ttft, own_tpot = harm(ttft_s / slo.ttft_s), harm(tpot_s / slo.tpot_s)
    harmed = part.others + link + terms.others + terms.memory
    total = own_ttft + own_tpot + own_pause + decode.slo.weight / slo.weight * harmed
    return Option(
        total,
        prefill,
        decode,
        part.tokens,
        ttft_s,
        tpot_s,
        own_ttft,
        own_tpot,
        own_pause,
        part.begins_s,
        hold_s,
        part.others,
        link,
        terms.others,
        terms.memory,
    )


def has_room(option: Option) -> bool:
    """Whether its KV finds room to the end of the answer when it comes to its decode instance."""
    return option.hold_s <= HOLD_S


def total_of(option: Option) -> float:
    """Its harm in all."""
    return option.total


def figures_of(option: Option) -> dict[str, float | str]:
    """What was predicted, and the terms of its harm."""
    return {
        "ttft_s": round(option.ttft_s, 4),
        "tpot_s": round(option.tpot_s, 5),
        "harm": round(option.total, 6),
        "own_ttft": round(option.own_ttft, 6),
        "own_tpot": round(option.own_tpot, 6),
        "own_pause": round(option.own_pause, 6),
        "others_prefill": round(option.others_prefill, 6),
        "others_link": round(option.others_link, 6),
        "others_decode": round(option.others_decode, 6),
        "memory": round(option.memory, 6),
    }
