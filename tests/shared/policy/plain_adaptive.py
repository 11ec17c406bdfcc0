"""What `adaptive` takes least of, written down term by term and without any care for speed; see docs/deciding.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from shared.domain.instance import InstanceView
from shared.domain.job import JobView, Slo
from shared.domain.rates import StepForm, StepRates
from shared.policy.answers import Lengths


def harm(x: float) -> float:
    if x <= 0:
        return 0.0
    return x**4 / (1 + x**4) + 0.1 * x + 0.1 * max(0.0, x - 1)


def step_s(form: StepForm, decodes: float, context: float) -> float:
    return form.fixed_s + form.sequence_s * decodes + form.context_s * context


def chunk_s(form: StepForm, tokens: float, before: float) -> float:
    return tokens * (form.token_s + form.position_s * (before + tokens / 2))


def steps_of(view: InstanceView) -> StepRates:
    assert view.info.rates.step is not None
    return view.info.rates.step


@dataclass(frozen=True)
class Prefill:
    view: InstanceView
    saved: int

    @property
    def wait_s(self) -> float:
        load, form = self.view.load, steps_of(self.view).prefill
        mean = load.queued_prefill_tokens / max(1, load.queued_prefill)
        each_s = form.token_s + form.position_s * mean / 2 + form.fixed_s / self.view.info.chunk_size
        return load.queued_prefill_tokens * each_s

    def own_s(self, tokens: int) -> float:
        form, saved = steps_of(self.view).prefill, min(self.saved, tokens - 1)
        fresh, chunk = tokens - saved, self.view.info.chunk_size
        steps = max(1.0, fresh / chunk) if self.view.load.queued_prefill else ceil(fresh / chunk)
        return steps * form.fixed_s + chunk_s(form, fresh, saved)

    def begins_s(self, tokens: int) -> float:
        """Until its first chunk is computed, when it takes blocks at the decode instance."""
        return self.wait_s + self.own_s(min(tokens, self.view.info.chunk_size))

    def others(self, tokens: int, slo: Slo) -> float:
        after_s = self.wait_s + self.own_s(tokens)
        return self.view.load.queued_prefill * (harm(after_s / slo.ttft_s) - harm(self.wait_s / slo.ttft_s))


@dataclass(frozen=True)
class Decode:
    view: InstanceView
    saved: int
    own: Lengths
    usual: Lengths
    spread_s: float  # over which those come that are on their way

    @property
    def seats(self) -> int:
        return self.view.info.max_seqs or 1 << 30

    @property
    def away(self) -> float:
        load, form = self.view.load, steps_of(self.view).decode
        if not load.coming or self.spread_s <= 0:
            return 0.0
        running = min(load.decoding, self.seats)
        there_s = self.usual.mean * step_s(form, running, load.context_tokens * running / load.decoding)
        return max(0.0, 1 - there_s / self.spread_s)

    @property
    def decodes(self) -> int:
        return self.view.load.decoding - round(self.away * self.view.load.coming)

    @property
    def context(self) -> float:
        return self.view.load.context_tokens - self.away * self.view.load.coming_tokens

    @property
    def free(self) -> float:
        load = self.view.load
        there = load.free_blocks * self.view.info.block_size - load.waiting_tokens
        return there + self.away * load.coming_tokens

    @property
    def running(self) -> int:
        return min(self.decodes, self.seats)

    @property
    def running_context(self) -> float:
        return self.context * self.running / self.decodes if self.running else 0.0

    @property
    def form(self) -> StepForm:
        rates = steps_of(self.view)
        return rates.mixed if self.running else rates.prefill

    @property
    def budget(self) -> int:
        return max(1, self.view.info.chunk_size - self.running)

    @property
    def alone_s(self) -> float:
        return step_s(steps_of(self.view).decode, self.running, self.running_context) if self.running else 0.0

    def full_s(self, prompt: int) -> float:
        beside_s = step_s(self.form, self.running, self.running_context)
        return beside_s + chunk_s(self.form, self.budget, prompt / 2)

    def wait_s(self, prompt: int) -> float:
        return self.view.load.queued_prefill_tokens / self.budget * self.full_s(prompt)

    def after_s(self, prompt: int) -> float:
        if self.running >= self.seats:
            return self.alone_s
        longer = self.running_context + prompt + self.own.mean / 2
        return step_s(steps_of(self.view).decode, self.running + 1, longer)

    def beside_s(self, prompt: int) -> float:
        steps = self.view.load.queued_prefill_tokens / self.budget
        share = max(self.view.load.prefill_share, min(1.0, steps / self.own.brief))
        return share * max(0.0, self.full_s(prompt) - self.alone_s)

    def room(self, prompt: int, slo: Slo) -> tuple[float, float, float]:
        """The wait for room, by how much it makes others wait, and the harm of preemptions."""
        stay_s = self.usual.mean * self.after_s(prompt)
        room_s = behind_s = memory = 0.0
        if (over := self.decodes + 1 - self.seats) > 0:
            behind_s = stay_s / self.seats
            room_s = over * behind_s
        load, size = self.view.load, self.view.info.block_size
        in_use = (self.view.info.total_blocks - load.free_blocks) * size
        held = load.context_tokens - load.queued_prefill_tokens - load.waiting_tokens
        takes = max(1, prompt - min(self.saved, int(max(0, held - in_use) / load.decoding if load.decoding else 0)))
        if (short := takes + self.own.mean - self.free) > 0:
            release_s = stay_s / max(1.0, self.context)
            mean = self.context / self.decodes if self.decodes else takes
            redo_s = mean // -self.budget * -self.form.fixed_s + mean * self.form.token_s + short * release_s
            redone = harm((self.after_s(prompt) + redo_s / self.usual.mean) / slo.tpot_s)
            memory = min(1.0, short / max(1.0, mean)) * redone
            behind_s = max(behind_s, (takes + self.own.mean) * release_s)
            room_s = max(room_s, (takes - self.free) * release_s)
        used = 1.0 - self.view.load.free_blocks / self.view.info.total_blocks
        return room_s, behind_s, memory + 1e-6 * used


@dataclass(frozen=True)
class Way:
    prefill: Prefill | None
    decode: Decode
    split: int


def total(way: Way, job: JobView) -> float:
    """Of all terms; harm to others is judged by the job's own targets."""
    decode, prompt, slo = way.decode, job.prompt_tokens, job.slo
    room_s, behind_s, memory = decode.room(prompt, slo)
    before = max(way.split, decode.saved)
    rest, rest_s, stall_s, others = prompt - before, 0.0, 0.0, 0.0
    if rest > 0:
        steps = ceil(rest / decode.budget)
        own_s = steps * step_s(decode.form, decode.running, decode.running_context)
        own_s += chunk_s(decode.form, rest, before)
        stall_s = max(0.0, own_s - steps * decode.alone_s)
        wait_s = decode.wait_s(prompt)
        rest_s = wait_s + own_s
        others += decode.view.load.queued_prefill * (harm(rest_s / slo.ttft_s) - harm(wait_s / slo.ttft_s))
    beside_s, after_s, usual = decode.beside_s(prompt), decode.after_s(prompt), decode.usual
    longer_s = after_s + stall_s / usual.mean + beside_s
    others += decode.running * (harm(longer_s / slo.tpot_s) - harm((decode.alone_s + beside_s) / slo.tpot_s))
    if (over := decode.decodes - decode.running) > 0:
        now_s = after_s + room_s / usual.brief
        behind_s = (behind_s + stall_s) / usual.brief
        memory += over * (harm((now_s + behind_s) / slo.tpot_s) - harm(now_s / slo.tpot_s))
    ttft_s, tpot_s, pause_s = room_s + rest_s, after_s + beside_s, 0.0
    if way.prefill is not None:
        ready_s = way.prefill.wait_s + way.prefill.own_s(way.split)
        waits_s, moves_s = transfer(way)
        arrives_s = max(ready_s + moves_s * min(1.0, way.prefill.view.info.chunk_size / way.split), waits_s + moves_s)
        if way.split == prompt:
            pause_s = arrives_s - ready_s
            ttft_s = ready_s + max(0.0, room_s - way.prefill.begins_s(way.split))  # it waits before it is computed
            tpot_s += pause_s / decode.own.brief
        else:
            ttft_s = max(arrives_s, room_s) + rest_s
        others += way.prefill.others(way.split, slo)
        if waits_s > 0 and moves_s > 0:
            now_s = tpot_s + waits_s / usual.brief
            link = harm((now_s + moves_s / usual.brief) / slo.tpot_s) - harm(now_s / slo.tpot_s)
            others += waits_s / moves_s * link
    return harm(ttft_s / slo.ttft_s) + harm(tpot_s / slo.tpot_s) + harm(pause_s / slo.itl_s) + others + memory


def transfer(way: Way) -> tuple[float, float]:
    """Until it could begin, and how long it takes, in raw KV."""
    assert way.prefill is not None
    sender, receiver = way.prefill.view, way.decode.view
    tokens = way.split - way.decode.saved
    there, out = receiver.info.rates.link, sender.info.rates.link
    if there is None or tokens <= 0:
        return 0.0, 0.0
    sends_s = sender.load.staged_bytes / out.bytes_s if out else 0.0
    bytes_s = min(there.from_s(sender.instance_id), out.bytes_s if out else float("inf"))
    moves_s = tokens * sender.info.kv_bytes_per_token / bytes_s + there.latency_s
    return max(receiver.load.inbound_bytes / there.bytes_s, sends_s), moves_s


def ways(job: JobView, prefills: list[Prefill], decodes: list[Decode]) -> Iterator[Way]:
    """None on each; all on each prefill instance with the best decode instance, and on the best with each; balanced."""
    prompt = job.prompt_tokens
    nones = [Way(None, decode, 0) for decode in decodes]
    yield from nones
    if not prefills:
        return

    def through(one: Prefill) -> float:
        return one.wait_s + one.own_s(prompt) + one.others(prompt, job.slo) * job.slo.ttft_s

    first, *rest = sorted(prefills, key=through)
    alls = [Way(first, decode, prompt) for decode in decodes]
    partner = min(alls, key=lambda way: total(way, job)).decode
    alls += [Way(one, partner, prompt) for one in rest]
    yield from alls
    best, most_local = (min(found, key=lambda way: total(way, job)) for found in (alls, nones))
    assert best.prefill is not None
    for decode in (most_local.decode, best.decode):
        token_s = decode.full_s(prompt) / decode.budget
        even = decode.wait_s(prompt) - best.prefill.wait_s + prompt * token_s
        split = round(even / (best.prefill.own_s(prompt) / prompt + token_s))
        if 0 < split < prompt:
            yield Way(best.prefill, decode, split)
