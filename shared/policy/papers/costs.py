"""The linear costs of the papers, derived from an instance's step cost and its chunk size.

`least_load` and `cronus` use Cronus' costs; `workload` and the planner's `exhaustive` use Huawei's.
"""

from typing import NamedTuple

from shared.domain.rates import StepRates

# The cost of a token grows with its position. The forms of the papers have one cost for all tokens of a prompt: the one
# at this position for a part of a prompt, and at half of it, the mean over the prompt, for whole prompts.
_POSITION = 1024.0


class PartialPrefillCost(NamedTuple):
    """Prefill of the first part of a prompt. Source: Cronus eq. 2: T = k_p·L_p + b_p."""

    k_p: float
    b_p: float

    @classmethod
    def from_steps(cls, steps: StepRates, chunk: int) -> "PartialPrefillCost":
        """A prompt of n tokens takes n / chunk full steps and, on average, half a step that is not full."""
        form = steps.prefill
        return cls(form.token_s + form.fixed_s / chunk + form.position_s * _POSITION, form.fixed_s / 2.0)

    def time_s(self, tokens: float) -> float:
        return self.k_p * tokens + self.b_p


class ChunkedCost(NamedTuple):
    """One chunked iteration. Source: Cronus eq. 3: t = k_ctxp·L_ctx + k_ctxd·ΣL_decode + b_c."""

    k_ctxp: float
    k_ctxd: float
    b_c: float

    @classmethod
    def from_steps(cls, steps: StepRates, chunk: int) -> "ChunkedCost":
        form = steps.mixed
        full_s = form.fixed_s + chunk * (form.token_s + form.position_s * chunk / 2.0)
        return cls(form.position_s * chunk, form.context_s, full_s)

    def time_s(self, prefill_context: float, decode_context: float) -> float:
        """Seconds of one iteration with a full token budget."""
        return self.k_ctxp * prefill_context + self.k_ctxd * decode_context + self.b_c


class HuaweiCost(NamedTuple):
    """p1…p8 of one (machine, t). Source: Huawei eqs 3–4. b: requests in a padded batch; lengths in tokens."""

    p1: float
    p2: float
    p3: float
    p4: float
    p5: float
    p6: float
    p7: float
    p8: float

    @classmethod
    def from_steps(cls, steps: StepRates, chunk: int) -> "HuaweiCost":
        prefill, decode = steps.prefill, steps.per_token
        token_s = prefill.token_s + prefill.fixed_s / chunk + prefill.position_s * (_POSITION / 2.0)
        prompts = token_s, 0.0, 0.0, prefill.fixed_s / 2.0
        return cls(*prompts, decode.context_s, decode.sequence_s, 0.0, decode.fixed_s)

    def prefill_s(self, batch: float, prompt: float) -> float:
        """T_pre(b, S) = p1·b·S + p2·b + p3·S + p4."""
        return self.p1 * batch * prompt + self.p2 * batch + self.p3 * prompt + self.p4

    def decode_s(self, batch: float, prompt: float, output: float) -> float:
        """T_dec = (p5·b + p7)·(O·S + O(O+1)/2) + (p6·b + p8)·O, the sum of p5·b·l + p6·b + p7·l + p8 over lengths l."""
        walked = output * prompt + output * (output + 1.0) / 2.0
        return (self.p5 * batch + self.p7) * walked + (self.p6 * batch + self.p8) * output
