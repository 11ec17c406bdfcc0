"""What a worker tells of its engine's steps: raw material for calibration and for looking inside."""

import msgspec

from shared.domain.numbers import Finite


class StepRecord(msgspec.Struct, frozen=True):
    """One engine step that computed something.

    `seconds` is from the start of the step, new requests taken in, until its tokens were on their way. `prefill`:
    (tokens computed now, tokens computed before) of each chunk; a single token after some context counts as a decode.
    `decode_context_tokens` is without the tokens under way.
    """

    number: int  # counts up from 0 while the instance lives
    ended_s: Finite  # unix time
    seconds: Finite
    cpu_s: Finite  # of it, what the engine's own thread computed; 0 where that says nothing (emulated, remote ranks)
    prefill: tuple[tuple[int, int], ...]
    decode_count: int
    decode_context_tokens: int


class StepPage(msgspec.Struct, frozen=True):
    """Steps in order, from the number that was asked for. Ask for `next` to go on.

    `lost` counts steps that were asked for and are forgotten by now.
    """

    instance_id: str
    generation: int
    steps: tuple[StepRecord, ...]
    next: int
    lost: int
