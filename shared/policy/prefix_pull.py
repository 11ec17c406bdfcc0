"""Pulls of prefixes: what it takes to bring the beginning of a prompt from an instance that holds it.

The instance that computes the beginning of a prompt can pull the KV of a prefix from the prefix cache of another
instance, of either role, instead of computing it. The holder gathers the blocks between its steps and sends them, while
the job waits in the queue of the puller.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter

from shared.domain.instance import InstanceView
from shared.domain.kv import EXPORT_SHARE
from shared.domain.rates import UNKNOWN_STEPS
from shared.policy.estimate import DecodeSide, JobContext, PrefillSide, Pull, slo_cost
from shared.policy.index import ClusterIndex, InstanceIds
from shared.policy.saved_tokens import saved_of

GATHER_BYTES_S = 20e9  # of KV, by each rank of a holder, into the memory from which it is sent
ROUND_TRIPS_S = 0.005  # of the messages to the holder and to the puller
LEAST_TOKENS = 128  # a pull of fewer is not worth its messages
UNKNOWN_BYTES_S = 1e9  # of a link that neither end has measured: the first pulls measure it
HOLDERS = 3  # whose loads are compared, those with the longest runs
SIDES = 2  # of each role that may pull: those that would have the prompt first


def gather_s(wire_bytes: float, ranks: int) -> float:
    """Seconds of a holder's time that the gathering of so many bytes of KV takes."""
    return wire_bytes / (GATHER_BYTES_S * max(1, ranks))


class Holder:
    """An instance that holds the first `tokens` of the prompt, the last `hosted` of these in host memory: when it could
    export them, and whom that delays.
    """

    __slots__ = ("begins_s", "decodes", "hosted", "jobs", "kv_bytes", "sends_s", "step_s", "tokens", "view", "wait_s")

    def __init__(self, view: InstanceView, tokens: int, hosted: int = 0) -> None:
        info, load = view.info, view.load
        self.hosted = hosted
        rates, link = info.rates.step or UNKNOWN_STEPS, info.rates.link
        self.view, self.tokens, self.kv_bytes = view, tokens, info.kv_bytes_per_token
        self.decodes = decodes = min(load.decoding, info.max_seqs or load.decoding)
        self.jobs = load.queued_prefill
        context = load.context_tokens * decodes / load.decoding if decodes else 0.0
        chunk = min(load.queued_prefill_tokens, max(1, info.chunk_size - decodes))
        self.step_s = rates.token_s(decodes, context) if decodes else 0.0
        self.begins_s = rates.mixed_s(chunk, 0, decodes, context) if decodes or chunk else 0.0  # its present step
        self.wait_s = rates.prefill_s(load.queued_prefill_tokens, 0) if self.jobs else 0.0
        self.sends_s = load.staged_bytes / (link.bytes_s if link is not None else UNKNOWN_BYTES_S)

    def ready_s(self, view: InstanceView, lacks: int) -> float:
        """Seconds until `lacks` tokens of the prompt could be at an instance."""
        info, link, out = self.view.info, view.info.rates.link, self.view.info.rates.link
        wire_bytes = lacks * self.kv_bytes
        bytes_s, waits_s, latency_s = UNKNOWN_BYTES_S, self.sends_s, 0.0
        if link is not None:
            bytes_s, latency_s = link.slow.get(info.instance_id, link.bytes_s), link.latency_s
            inbound_s = view.load.inbound_bytes / link.bytes_s
            if inbound_s > waits_s:
                waits_s = inbound_s
        if out is not None and (link is None or out.bytes_s < bytes_s):
            bytes_s = out.bytes_s
        gathered_s = self.gather_s(lacks)
        if self.decodes:
            gathered_s /= EXPORT_SHARE
        moved_s = waits_s + wire_bytes / bytes_s + latency_s
        return ROUND_TRIPS_S + self.begins_s + (moved_s if moved_s > gathered_s else gathered_s)

    def gather_s(self, tokens: int) -> float:
        """Of the last `tokens`; those in host memory are loaded first."""
        info = self.view.info
        seconds = gather_s(tokens * self.kv_bytes, info.tensor_parallel)
        return seconds + info.rates.host_token_s * min(tokens, self.hosted) if self.hosted else seconds

    def others(self, tokens: int, context: JobContext) -> float:
        """The cost to the decodes here and to the prompts that wait here, which the gathering of `tokens` delays."""
        slo, cost, engine_s = context.others, 0.0, self.gather_s(tokens)
        if self.decodes:
            longer_s = self.step_s + engine_s / context.usual.mean
            cost = self.decodes * (slo_cost(longer_s / slo.tpot_s) - slo_cost(self.step_s / slo.tpot_s))
        if self.jobs:
            now_s = self.wait_s
            cost += self.jobs * (slo_cost((now_s + engine_s) / slo.ttft_s) - slo_cost(now_s / slo.ttft_s))
        return cost


def holders_of(
    index: ClusterIndex, held: Mapping[str, int], exclude: InstanceIds, hosted: Mapping[str, int] = {}
) -> list[Holder]:
    """The ready instances with the longest runs of a prompt's prefix, the longest first; of equal ones, the one that
    could send it first. held: ids and tokens, the longest run first. hosted: of these tokens,
    those in host memory.
    """
    found: list[Holder] = []
    for instance_id, tokens in held.items():
        view = index.prefill.get(instance_id) or index.decode.get(instance_id)
        if tokens < LEAST_TOKENS or len(found) == HOLDERS:
            break
        if view is not None and instance_id not in exclude:
            found.append(Holder(view, tokens, hosted.get(instance_id, 0)))
    found.sort(key=lambda one: (-one.tokens, one.begins_s + one.sends_s))
    return found


def offer_pulls(
    holders: Sequence[Holder], sides: Sequence[PrefillSide] | Sequence[DecodeSide], context: JobContext
) -> None:
    """Give a few of the sides, which are of one role, the pull that each could make, where that makes the prompt ready
    sooner there.
    """
    prompt, found = context.job.prompt_tokens, []
    for side in sides:
        offer = _offer(holders, side, prompt)
        if offer is not None:
            holder, tokens, pull_s = offer
            wait_s = side.wait_s
            ready_s = (pull_s if pull_s > wait_s else wait_s) + side.own_s(prompt, tokens)
            if ready_s < wait_s + side.own_s(prompt):
                found.append((ready_s, side, offer))
    found.sort(key=itemgetter(0))
    for _, side, (holder, tokens, pull_s) in found[:SIDES]:
        lacks = tokens - side.saved
        side.pull = Pull(holder.view, tokens, lacks, pull_s, holder.others(lacks, context))


def pull_of(holders: Sequence[Holder], side: PrefillSide | DecodeSide, context: JobContext) -> Pull | None:
    """The pull that a side could make, whether or not it is worth it."""
    offer = _offer(holders, side, context.job.prompt_tokens)
    if offer is None:
        return None
    holder, tokens, pull_s = offer
    lacks = tokens - side.saved
    return Pull(holder.view, tokens, lacks, pull_s, holder.others(lacks, context))


def _offer(holders: Sequence[Holder], side: PrefillSide | DecodeSide, prompt: int) -> tuple[Holder, int, float] | None:
    """The first holder from which the side could pull, the tokens that it would have then, and the seconds until it
    would have them. KV of another precision is not pulled: it would not join the prefixes of the side.
    """
    saved, view = side.saved, side.view
    info = view.info
    for holder in holders:
        if holder.tokens - saved < LEAST_TOKENS:
            return None
        other = holder.view.info
        if other.instance_id == info.instance_id or other.precision != info.precision:
            continue
        tokens = saved_of(holder.tokens, view, prompt)
        return (holder, tokens, holder.ready_s(view, tokens - saved)) if tokens - saved >= LEAST_TOKENS else None
    return None
