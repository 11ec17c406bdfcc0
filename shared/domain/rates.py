"""Rates of an instance: the costs of its engine steps, its link and its KV codecs, in linear forms that a decision
evaluates quickly.
"""

from enum import StrEnum

import msgspec


class StepSource(StrEnum):
    """Where an instance's step cost comes from."""

    CATALOGUE = "catalogue"  # the cost model of its accelerator
    FIT = "fit"  # a calibration of instances of its kind
    LEARNED = "learned"  # its own steps


class StepForm(msgspec.Struct, frozen=True):
    """Seconds of one kind of engine step, linear in its work.

    token_s: a prompt token. position_s: a prompt token for each token before it, its own chunk's included (attention).
    sequence_s: a decode. context_s: a token of the decodes' contexts. error: median relative error
    of a step's time. steps: number of steps that it was learned from; 0: not measured yet.
    """

    fixed_s: float
    token_s: float = 0.0
    position_s: float = 0.0
    sequence_s: float = 0.0
    context_s: float = 0.0
    error: float = 0.0
    steps: int = 0

    def scaled(self, factor: float) -> "StepForm":
        """The form of steps that take `factor` times as long."""
        return msgspec.structs.replace(
            self,
            fixed_s=self.fixed_s * factor,
            token_s=self.token_s * factor,
            position_s=self.position_s * factor,
            sequence_s=self.sequence_s * factor,
            context_s=self.context_s * factor,
        )


class StepRates(msgspec.Struct, frozen=True):
    """The step cost of an instance: of steps with prefill chunks, with decodes, and with both.

    source: a `StepSource`, or one that a later release knows. gain: tokens that a decode gains in a step, on average;
    more than 1 with speculative decoding.
    """

    prefill: StepForm
    decode: StepForm
    mixed: StepForm
    source: str = StepSource.CATALOGUE
    gain: float = 1.0

    def scaled(self, factor: float) -> "StepRates":
        prefill, decode, mixed = (form.scaled(factor) for form in (self.prefill, self.decode, self.mixed))
        return StepRates(prefill, decode, mixed, self.source, self.gain)

    @property
    def per_token(self) -> StepForm:
        """`decode`, for a token of each decode instead of a step."""
        return self.decode if self.gain == 1.0 else self.decode.scaled(1.0 / self.gain)

    def prefill_s(self, tokens: float, before: float) -> float:
        """A step of one chunk after `before` earlier tokens."""
        form = self.prefill
        return form.fixed_s + tokens * (form.token_s + form.position_s * (before + tokens / 2.0))

    def decode_s(self, decodes: float, context: float) -> float:
        """A step of `decodes` whose contexts sum to `context`."""
        form = self.decode
        return form.fixed_s + form.sequence_s * decodes + form.context_s * context

    def token_s(self, decodes: float, context: float) -> float:
        """A token of each of `decodes` whose contexts sum to `context`, in steps of decodes."""
        return self.decode_s(decodes, context) / self.gain

    def mixed_s(self, tokens: float, before: float, decodes: float, context: float) -> float:
        """A step of both; without decodes or without a chunk it is a step of the other kind."""
        if decodes <= 0:
            return self.prefill_s(tokens, before)
        if tokens <= 0:
            return self.decode_s(decodes, context)
        form = self.mixed
        chunk_s = tokens * (form.token_s + form.position_s * (before + tokens / 2.0))
        return form.fixed_s + chunk_s + form.sequence_s * decodes + form.context_s * context


class CodecRate(msgspec.Struct, frozen=True):
    """Speeds at which an instance codes KV, in bytes of stored KV a second."""

    encode_bytes_s: float
    decode_bytes_s: float


class LinkRate(msgspec.Struct, frozen=True):
    """The bandwidth of an instance's network port, and the latency of a transfer.

    slow: bandwidth from much slower senders, by instance id. coded: bytes of stored KV a second that arrived coded, by
    codec, and by codec and instance id for much slower senders.
    """

    bytes_s: float
    latency_s: float = 0.0
    slow: dict[str, float] = {}
    coded: dict[str, float] = {}

    def from_s(self, instance_id: str) -> float:
        return self.slow.get(instance_id, self.bytes_s)

    def coded_from_s(self, codec: str, instance_id: str) -> float | None:
        """Bytes of stored KV a second that arrived from that instance in that codec; None without any."""
        return self.coded.get(f"{codec} {instance_id}", self.coded.get(codec))


UNKNOWN_STEPS = StepRates(  # of an instance without measurements: a mid-range accelerator with a mid-size model
    StepForm(0.02, 1e-4, 1e-8), StepForm(0.02, 0.0, 0.0, 1e-4, 2e-7), StepForm(0.02, 1e-4, 1e-8, 1e-4, 2e-7)
)


class Rates(msgspec.Struct, frozen=True):
    """What policies know of an instance's speed and price, independent of its name. None: not measured.

    link: of KV that comes or goes. codecs: by name, what coding costs its processors; a codec without an entry is taken
    to cost nothing. price_per_hour: USD for the whole instance. weight: its share of the requests under weighted
    placement. host_token_s: seconds that a step takes longer for a prompt token whose KV is loaded from host memory; 0
    without a host tier. Earlier releases also published `prefill`, `chunked` and `batch`, the costs of papers, which
    `shared.policy.papers.costs` derives from `step`; readers ignore these fields.
    """

    step: StepRates | None = None
    link: LinkRate | None = None
    codecs: dict[str, CodecRate] = {}
    price_per_hour: float = 0.0
    weight: float = 1.0
    host_token_s: float = 0.0
