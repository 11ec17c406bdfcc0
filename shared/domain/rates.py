"""Rates of an instance: measured step, link and codec costs, as linear forms that a decision evaluates quickly."""

import msgspec


class HuaweiCost(msgspec.Struct, frozen=True):
    """p1…p8 of one (machine, t). Source: Huawei eqs 3–4. b: requests in a padded batch; lengths in tokens."""

    p1: float
    p2: float
    p3: float
    p4: float
    p5: float
    p6: float
    p7: float
    p8: float

    def prefill_s(self, batch: float, prompt: float) -> float:
        """T_pre(b, S) = p1·b·S + p2·b + p3·S + p4."""
        return self.p1 * batch * prompt + self.p2 * batch + self.p3 * prompt + self.p4

    def decode_step_s(self, batch: float, length: float) -> float:
        """One iteration at length l: p5·b·l + p6·b + p7·l + p8."""
        return self.p5 * batch * length + self.p6 * batch + self.p7 * length + self.p8

    def decode_s(self, batch: float, prompt: float, output: float) -> float:
        """T_dec = (p5·b + p7)·(O·S + O(O+1)/2) + (p6·b + p8)·O."""
        walked = output * prompt + output * (output + 1.0) / 2.0
        return (self.p5 * batch + self.p7) * walked + (self.p6 * batch + self.p8) * output


class PartialPrefillCost(msgspec.Struct, frozen=True):
    """Prefill of a prompt's first part. Source: Cronus eq. 2: T = k_p·L_p + b_p."""

    k_p: float
    b_p: float

    def time_s(self, tokens: float) -> float:
        return self.k_p * tokens + self.b_p


class ChunkedCost(msgspec.Struct, frozen=True):
    """One chunked iteration. Source: Cronus eq. 3: t = k_ctxp·L_ctx + k_ctxd·ΣL_decode + b_c."""

    k_ctxp: float
    k_ctxd: float
    b_c: float

    def time_s(self, prefill_context: float, decode_context: float) -> float:
        """Seconds of one iteration with a full token budget."""
        return self.k_ctxp * prefill_context + self.k_ctxd * decode_context + self.b_c


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


class StepRates(msgspec.Struct, frozen=True):
    """The costs of steps with prefill chunks, with decodes, and with both."""

    prefill: StepForm
    decode: StepForm
    mixed: StepForm

    def prefill_s(self, tokens: float, before: float) -> float:
        """A step of one chunk after `before` earlier tokens."""
        form = self.prefill
        return form.fixed_s + tokens * (form.token_s + form.position_s * (before + tokens / 2.0))

    def decode_s(self, decodes: float, context: float) -> float:
        """A step of `decodes` whose contexts sum to `context`."""
        form = self.decode
        return form.fixed_s + form.sequence_s * decodes + form.context_s * context

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
    """What policies know of an instance's speed and price, measured and independent of its name. None: not measured.

    prefill: a prompt, or its first part, on this instance alone. chunked: one step of a full chunk beside its decodes.
    batch: prefill and decode of padded batches. step: any step. link: of KV that comes or goes. codecs: by name, what
    coding costs its processors; one that is not named is not known to cost any. price_per_hour: USD for the whole
    instance. weight: its share of the requests under weighted placement.
    """

    prefill: PartialPrefillCost | None = None
    chunked: ChunkedCost | None = None
    batch: HuaweiCost | None = None
    step: StepRates | None = None
    link: LinkRate | None = None
    codecs: dict[str, CodecRate] = {}
    price_per_hour: float = 0.0
    weight: float = 1.0
