"""Pulls of prefixes: what it takes to bring the beginning of a prompt from an instance that holds it.

The instance that computes the beginning of a prompt can pull the KV of a prefix from the prefix cache of another
instance, of either role, instead of computing it. The holder gathers the blocks between its steps and sends them, while
the job waits in the queue of the puller.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from shared.domain.instance import InstanceView
from shared.domain.rates import UNKNOWN_STEPS
from shared.policy.estimate import DecodeSide, JobContext, PrefillSide, Pull, slo_cost
from shared.policy.index import ClusterIndex, InstanceIds
from shared.policy.saved_tokens import saved_of

GATHER_BYTES_S = 20e9  # of KV, by each rank of a holder, into the memory from which it is sent
EXPORT_SHARE = 0.2  # of the time of an instance that decodes, the most that exports from its cache take
ROUND_TRIPS_S = 0.005  # of the messages to the holder and to the puller
LEAST_TOKENS = 128  # a pull of fewer is not worth its messages
UNKNOWN_BYTES_S = 1e9  # of a link that neither end has measured: the first pulls measure it
SIDES = 2  # of each role that may pull: those that would have the prompt first


def gather_s(wire_bytes: float, ranks: int) -> float:
    """Seconds of a holder's time that the gathering of so many bytes of KV takes."""
    return wire_bytes / (GATHER_BYTES_S * max(1, ranks))


class Holder:
    """An instance that holds the first `tokens` of the prompt: when it could export them, and whom that delays."""

    __slots__ = ("begins_s", "decodes", "jobs", "sends_s", "step_s", "tokens", "view", "wait_s")

    def __init__(self, view: InstanceView, tokens: int) -> None:
        info, load = view.info, view.load
        rates, link = info.rates.step or UNKNOWN_STEPS, info.rates.link
        self.view, self.tokens = view, tokens
        self.decodes = decodes = min(load.decoding, info.max_seqs or load.decoding)
        self.jobs = load.queued_prefill
        context = load.context_tokens * decodes / load.decoding if decodes else 0.0
        chunk = min(load.queued_prefill_tokens, max(1, info.chunk_size - decodes))
        self.step_s = rates.token_s(decodes, context) if decodes else 0.0
        self.begins_s = rates.mixed_s(chunk, 0, decodes, context) if decodes or chunk else 0.0  # its present step
        self.wait_s = rates.prefill_s(load.queued_prefill_tokens, 0) if self.jobs else 0.0
        self.sends_s = load.staged_bytes / (link.bytes_s if link is not None else UNKNOWN_BYTES_S)

    def pull(self, view: InstanceView, saved: int, context: JobContext) -> Pull | None:
        """What an instance that holds `saved` tokens itself could pull from here; None where that is too little."""
        tokens = saved_of(self.tokens, view, context.job.prompt_tokens)
        lacks = tokens - saved
        if lacks < LEAST_TOKENS:
            return None
        info, link, out = self.view.info, view.info.rates.link, self.view.info.rates.link
        wire_bytes = lacks * info.kv_bytes_per_token
        bytes_s, latency_s, inbound_s = UNKNOWN_BYTES_S, 0.0, 0.0
        if link is not None:
            bytes_s, latency_s = link.from_s(info.instance_id), link.latency_s
            inbound_s = view.load.inbound_bytes / link.bytes_s
        if out is not None and (link is None or out.bytes_s < bytes_s):
            bytes_s = out.bytes_s
        waits_s = inbound_s if inbound_s > self.sends_s else self.sends_s
        engine_s = gather_s(wire_bytes, info.tensor_parallel)
        gathered_s = engine_s / EXPORT_SHARE if self.decodes else engine_s
        moved_s = waits_s + wire_bytes / bytes_s + latency_s
        ready_s = ROUND_TRIPS_S + self.begins_s + (moved_s if moved_s > gathered_s else gathered_s)
        return Pull(self.view, tokens, lacks, ready_s, self._others(engine_s, context))

    def _others(self, engine_s: float, context: JobContext) -> float:
        """The cost to the decodes here and to the prompts that wait here, which the gathering delays."""
        slo, cost = context.others, 0.0
        if self.decodes:
            longer_s = self.step_s + engine_s / context.usual.mean
            cost = self.decodes * (slo_cost(longer_s / slo.tpot_s) - slo_cost(self.step_s / slo.tpot_s))
        if self.jobs:
            now_s = self.wait_s
            cost += self.jobs * (slo_cost((now_s + engine_s) / slo.ttft_s) - slo_cost(now_s / slo.ttft_s))
        return cost


def offer_pulls(
    context: JobContext,
    index: ClusterIndex,
    held: Mapping[str, int],
    exclude: InstanceIds,
    prefills: Sequence[PrefillSide],
    decodes: Sequence[DecodeSide],
) -> None:
    """Give a few sides the pull that each could make, where that makes the prompt ready sooner.

    held: the instances with the longest runs of the prompt's prefix, and the tokens that they hold.
    """
    if context.job.local_only or not held or max(held.values()) < LEAST_TOKENS:
        return
    holders = []
    for instance_id, tokens in held.items():
        view = index.prefill.get(instance_id) or index.decode.get(instance_id)
        if view is not None and instance_id not in exclude:
            holders.append(Holder(view, tokens))
    holders.sort(key=lambda one: (-one.tokens, one.begins_s + one.sends_s))
    if holders:
        _offer(context, holders, prefills)
        _offer(context, holders, decodes)


def _offer(context: JobContext, holders: Sequence[Holder], sides: Sequence[PrefillSide] | Sequence[DecodeSide]) -> None:
    prompt, found = context.job.prompt_tokens, []
    for at, side in enumerate(sides):
        info = side.view.info
        for holder in holders:
            if holder.tokens - side.saved < LEAST_TOKENS:
                break
            other = holder.view.info
            if other.instance_id == info.instance_id or other.precision != info.precision:
                continue
            pull = holder.pull(side.view, side.saved, context)
            if pull is not None:
                wait_s, own_s = side.wait_s, side.own_s(prompt)
                ready_s = max(wait_s, pull.ready_s) + side.own_s(prompt, pull)
                if ready_s < wait_s + own_s:
                    found.append((ready_s, at, pull))
            break
    found.sort(key=itemgetter(0))
    for _, at, pull in found[:SIDES]:
        sides[at].pull = pull
