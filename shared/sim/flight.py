"""One request on its way through the cluster."""

from typing import TYPE_CHECKING

from shared.domain.job import JobView

if TYPE_CHECKING:
    from shared.sim.entry import Entry
    from shared.sim.instance import SimInstance


class Flight:
    """State of a request between its arrival and its last token.

    `job` is what policies see of the present attempt: after a lost instance its prompt has grown by the tokens that the
    client already has, and `output_left` has shrunk by them.
    """

    __slots__ = (
        "admitted", "attempt", "decode", "decode_entry", "first_token_s", "job", "last_token_s", "output_left",
        "prefill", "prefill_done_s", "prefill_entry", "prefix", "row", "sent_tokens", "split", "waits_prefill",
    )  # fmt: skip

    def __init__(self, row: int, job: JobView, output_tokens: int, prefix: tuple[int, ...]) -> None:
        self.row = row
        self.prefix = prefix
        self.attempt = 1
        self.first_token_s = -1.0
        self.last_token_s = -1.0  # as far as it is known: while it decodes, its engine knows better
        self.begin(job, output_tokens)

    def begin(self, job: JobView, output_left: int) -> None:
        """A new attempt, with nothing computed."""
        self.job = job
        self.output_left = output_left
        self.split = 0
        self.prefill: SimInstance | None = None
        self.decode: SimInstance | None = None
        self.prefill_entry: Entry | None = None
        self.decode_entry: Entry | None = None
        self.prefill_done_s = -1.0
        self.sent_tokens = 0  # of the split, on the wire or over it
        self.admitted = False  # the decode instance has blocks for the KV
        self.waits_prefill = False  # counts as a prompt that an instance has not computed yet
