"""Huawei section 3: the throughput of a tensor-parallel degree from a light profile, and its ranking of degrees."""

from collections.abc import Iterator, Sequence

from shared.domain.rates import HuaweiCost

Lengths = tuple[int, int]  # prompt and output tokens of a request


def estimated_throughput(cost: HuaweiCost, capacity_tokens: int, requests: Sequence[Lengths]) -> float:
    """Tokens a second of one instance. Source: Algorithm 1 (R): batches are timed at their longest lengths."""
    seconds = 0.0
    for batch in packed(capacity_tokens, requests):
        prompt, output = max(p for p, _ in batch), max(o for _, o in batch)
        seconds += cost.prefill_s(len(batch), prompt) + cost.decode_s(len(batch), prompt, output)
    return sum(p + o for p, o in requests) / seconds


def packed(capacity_tokens: int, requests: Sequence[Lengths]) -> Iterator[tuple[Lengths, ...]]:
    """The requests in order, in batches as large as the KV holds when each is padded to the longest.

    One more joins while (b + 1)·(max S + max O) <= capacity; a batch has at least one request.
    """
    batch: list[Lengths] = []
    for request in requests:
        grown = [*batch, request]
        longest = max(p for p, _ in grown) + max(o for _, o in grown)
        if batch and len(grown) * longest > capacity_tokens:
            yield tuple(batch)
            grown = [request]
        batch = grown
    if batch:
        yield tuple(batch)
