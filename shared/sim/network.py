"""KV on its way between instances: every instance has one port, out and in, which transfers take turns on."""

from shared.cost.transfer import Link


class Port:
    """One instance's network port. Outgoing and incoming traffic do not disturb each other (full duplex)."""

    __slots__ = ("in_free_s", "link", "out_free_s", "rate")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.rate = link.bandwidth_bytes_s * link.efficiency
        self.out_free_s = 0.0
        self.in_free_s = 0.0

    def clear(self, now: float) -> None:
        """Forget what was under way (the instance died)."""
        self.out_free_s = self.in_free_s = now


def send(source: Port, target: Port, wire_bytes: float, now: float) -> float:
    """When `wire_bytes` that are ready at `now` have arrived.

    A transfer has both ports to itself and waits for those before it: under contention the bytes a second are those of
    fair sharing, and transfers finish in order instead of all late. The longer of the two latencies comes on top, which
    delays this transfer and nobody else. Rate: the slower port (ThunderServe eq. 1 with effective rates).
    """
    begins = max(now, source.out_free_s, target.in_free_s)
    ends = begins + wire_bytes / min(source.rate, target.rate)
    source.out_free_s = target.in_free_s = ends
    return ends + max(source.link.latency_s, target.link.latency_s)
