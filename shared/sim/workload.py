"""What arrives: requests by their times and lengths, as arrays. Synthetic ones follow from a seed.

Synthetic workloads are made as whole arrays: a million requests take a fraction of a second.
"""

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from shared.domain.job import Slo
from shared.errors import InvalidRequest
from shared.policy.decode_admission import HEAVY_TOKENS

Times = NDArray[np.float64]
Lengths = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Mix:
    """Class and caller of each request: positions in `classes` and `callers`, shape [n] each."""

    classes: tuple[Slo, ...]
    class_of: Lengths
    callers: tuple[str, ...]
    caller_of: Lengths

    def head(self, count: int) -> "Mix":
        return replace(self, class_of=self.class_of[:count], caller_of=self.caller_of[:count])


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival.

    arrival_s: seconds from the start, not decreasing, shape [n]. prompt_tokens, output_tokens: at least 1, shape [n].
    prefixes: for each request the ids of its prompt's blocks of `prefix_block_tokens` tokens, in order (equal ids at
    the start of two prompts are equal text), or None where they are not known. answers: with prefixes, for each request
    the ids of the blocks that its answer fills, which follow the whole blocks of its prompt, as far as they are known.
    sessions: for each request the name of the conversation of which it is a turn, "" for none; None where there are
    none. mix: None where all are of the run's one class. Raises InvalidRequest that names the first request at fault.
    """

    name: str
    arrival_s: Times
    prompt_tokens: Lengths
    output_tokens: Lengths
    prefixes: tuple[tuple[int, ...], ...] | None = None
    prefix_block_tokens: int = 512
    answers: tuple[tuple[int, ...], ...] | None = None
    mix: Mix | None = None
    sessions: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        count = len(self.arrival_s)
        if not len(self.prompt_tokens) == len(self.output_tokens) == count:
            raise InvalidRequest(f"{self.name}: arrivals and lengths differ in number")
        if count == 0:
            raise InvalidRequest(f"{self.name}: no requests")
        if self.mix is not None and not len(self.mix.class_of) == len(self.mix.caller_of) == count:
            raise InvalidRequest(f"{self.name}: a mix of {len(self.mix.class_of)} requests, not {count}")
        if self.prefixes is not None and len(self.prefixes) != count:
            raise InvalidRequest(f"{self.name}: prefixes of {len(self.prefixes)} requests, not {count}")
        if self.answers is not None and (self.prefixes is None or len(self.answers) != count):
            raise InvalidRequest(f"{self.name}: answers of {len(self.answers)} requests, not {count} with prefixes")
        if self.sessions is not None and len(self.sessions) != count:
            raise InvalidRequest(f"{self.name}: sessions of {len(self.sessions)} requests, not {count}")
        for what, bad in (
            ("arrival_s is not a finite number >= 0", ~(np.isfinite(self.arrival_s) & (self.arrival_s >= 0))),
            ("arrives before its predecessor", np.concatenate(([False], np.diff(self.arrival_s) < 0))),
            ("prompt_tokens is less than 1", self.prompt_tokens < 1),
            ("output_tokens is less than 1", self.output_tokens < 1),
        ):
            if bad.any():
                raise InvalidRequest(f"{self.name}: request {int(np.argmax(bad))}: {what}")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def rate(self) -> float:
        """Requests a second over the span of the arrivals; infinite when all arrive at once."""
        span = float(self.arrival_s[-1] - self.arrival_s[0])
        return (len(self) - 1) / span if span > 0 else float("inf")

    def head(self, count: int) -> "Workload":
        prefixes = self.prefixes[:count] if self.prefixes is not None else None
        return replace(
            self,
            arrival_s=self.arrival_s[:count],
            prompt_tokens=self.prompt_tokens[:count],
            output_tokens=self.output_tokens[:count],
            prefixes=prefixes,
            answers=self.answers[:count] if self.answers is not None else None,
            mix=self.mix.head(count) if self.mix is not None else None,
            sessions=self.sessions[:count] if self.sessions is not None else None,
        )

    def rows(self, which: NDArray[np.intp] | NDArray[np.bool_]) -> "Workload":
        """These requests, in this order, with their arrivals: positions that do not decrease, or a mask."""
        at = np.arange(len(self))[which]
        rows: list[int] = at.tolist()
        mix = self.mix
        return replace(
            self,
            arrival_s=self.arrival_s[at],
            prompt_tokens=self.prompt_tokens[at],
            output_tokens=self.output_tokens[at],
            prefixes=self.prefixes and tuple(self.prefixes[row] for row in rows),
            answers=self.answers and tuple(self.answers[row] for row in rows),
            mix=mix and replace(mix, class_of=mix.class_of[at], caller_of=mix.caller_of[at]),
            sessions=self.sessions and tuple(self.sessions[row] for row in rows),
        )

    def without_prefixes(self) -> "Workload":
        return replace(self, prefixes=None, answers=None, sessions=None)

    def with_arrivals(self, arrival_s: Times) -> "Workload":
        return replace(self, arrival_s=np.asarray(arrival_s, dtype=np.float64))

    def at_once(self) -> "Workload":
        """All requests at time 0, to measure the highest throughput."""
        return self.with_arrivals(np.zeros(len(self)))

    def at_rate(self, rate: float) -> "Workload":
        """The same pattern of arrivals, stretched to `rate` requests a second; even gaps where all arrive at once."""
        if not rate > 0:
            raise InvalidRequest(f"{self.name}: rate must be positive, not {rate}")
        span = float(self.arrival_s[-1] - self.arrival_s[0])
        if span <= 0:
            return self.with_arrivals(np.arange(len(self)) / rate)
        shifted = self.arrival_s - self.arrival_s[0]
        return self.with_arrivals(shifted * ((len(self) - 1) / rate / span))


def oracle_tokens(
    prompts: Iterable[tuple[Sequence[int], int]],
    block_tokens: int,
    blocks: int | None = None,
    answers: Iterable[Sequence[int]] | None = None,
) -> list[int]:
    """Tokens of each prompt that one cache for all instances would save. prompts: in order of arrival, ids of whole
    blocks and tokens. answers: ids of the blocks that each answer fills, as far as they are known.

    The cache holds every block of every prompt and answer from the moment of its arrival, before an instance has
    computed it; of more than `blocks` (None: any number) the least recently used are forgotten. As in an engine the
    longest run of blocks from the start counts, and the last token is always computed.
    """
    held, found = OrderedDict[int, None](), []
    for (ids, tokens), answer in zip(prompts, repeat(()) if answers is None else answers, strict=False):
        run = next((at for at, block in enumerate(ids) if block not in held), len(ids))
        found.append(max(0, min(run * block_tokens, tokens - 1)))
        for block in (*ids, *answer):
            held[block] = None
            held.move_to_end(block)
        while blocks is not None and len(held) > blocks:
            held.popitem(last=False)
    return found


HEAVY_PROMPT_TOKENS = 512  # a prompt of more is a heavy prefill (TetriInfer 5.1)


def evenly(workload: Workload, rate: float) -> Workload:
    _require_positive(rate=rate)
    return workload.with_arrivals(np.arange(len(workload)) / rate)


def poisson(workload: Workload, rate: float, seed: int = 0) -> Workload:
    """The same requests as a Poisson process of `rate` requests a second."""
    _require_positive(rate=rate)
    return _with_gaps(workload, np.random.default_rng(seed).exponential(1.0 / rate, len(workload) - 1))


def bursts(workload: Workload, rate: float, seed: int = 0, cv: float = 2.0) -> Workload:
    """The same requests with gamma-distributed gaps of mean 1/rate and coefficient of variation `cv`.

    cv 1 is a Poisson process, less is more even, more is burstier: at 2 the likeliest gap is zero.
    """
    _require_positive(rate=rate, cv=cv)
    shape = 1.0 / cv**2
    return _with_gaps(workload, np.random.default_rng(seed).gamma(shape, 1.0 / (rate * shape), len(workload) - 1))


def on_off(workload: Workload, rate: float, seed: int = 0, on_s: float = 10.0, off_s: float = 10.0) -> Workload:
    """The same requests, `on_s` seconds of Poisson arrivals and `off_s` without, in turn; `rate` is over both."""
    _require_positive(rate=rate, on_s=on_s)
    if off_s < 0:
        raise InvalidRequest(f"off_s must be at least 0, not {off_s}")
    busy = poisson(workload, rate * (on_s + off_s) / on_s, seed).arrival_s
    return workload.with_arrivals(busy + np.floor(busy / on_s) * off_s)


def synthetic(
    count: int,
    prompt_tokens: float,
    output_tokens: float,
    *,
    prompt_cv: float = 0.0,
    output_cv: float = 0.0,
    longest_tokens: int | None = None,
    seed: int = 0,
) -> Workload:
    """`count` requests, all at time 0, with prompts and outputs of those mean lengths.

    A coefficient of variation above 0 makes lengths log-normal, independent of each other; 0 makes all lengths equal.
    longest_tokens: bound of prompt + output; longer requests are cut, the prompt first, which lowers the means.
    """
    _require_positive(count=count, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    rng = np.random.default_rng(seed)
    prompts = _lengths(rng, count, prompt_tokens, prompt_cv)
    outputs = _lengths(rng, count, output_tokens, output_cv)
    if longest_tokens is not None:
        if longest_tokens < 2:
            raise InvalidRequest(f"longest_tokens must be at least 2, not {longest_tokens}")
        prompts = np.minimum(prompts, np.maximum(1, longest_tokens - outputs))
        outputs = np.minimum(outputs, longest_tokens - prompts)
    return Workload(f"synthetic {prompt_tokens:g}/{output_tokens:g}", np.zeros(count), prompts, outputs)


class Tetri(StrEnum):
    """TetriInfer's workloads: light or heavy prefill (more than 512 tokens), light or heavy decode (more than 128)."""

    LPLD = "LPLD"
    LPHD = "LPHD"
    HPLD = "HPLD"
    HPHD = "HPHD"
    MIXED = "Mixed"


def tetri(
    kind: str, count: int = 128, seed: int = 0, lengths: Workload | None = None, longest_tokens: int = 2048
) -> Workload:
    """`count` requests of one of TetriInfer's workloads, all at time 0.

    With `lengths` (a table of ShareGPT's token counts), requests are drawn from its requests of that kind, each at most
    once while there are enough, and Mixed from all of them. Only requests of at most `longest_tokens` are drawn: the
    paper's OPT-13B has 2048. Without a table, lengths are log-normal stand-ins (see `_PROMPTS`), of which Mixed has a
    quarter each. Source: TetriInfer 5.1. Its table is not published: a table whose prompts hold the conversation so far
    (the public 8k-filtered one) has longer light prompts than the paper's median of 18.
    """
    try:
        chosen = Tetri(kind)
    except ValueError as error:
        raise InvalidRequest(f"unknown workload {kind!r}; known: {', '.join(Tetri)}") from error
    _require_positive(count=count)
    rng = np.random.default_rng(seed)
    if lengths is not None:
        return _drawn(chosen, count, rng, lengths, longest_tokens)
    return _stand_in(chosen, count, rng, longest_tokens)


def _drawn(kind: Tetri, count: int, rng: np.random.Generator, table: Workload, longest: int) -> Workload:
    usable = table.prompt_tokens + table.output_tokens <= longest
    if kind is not Tetri.MIXED:
        usable &= (table.prompt_tokens > HEAVY_PROMPT_TOKENS) == (kind[0] == "H")
        usable &= (table.output_tokens > HEAVY_TOKENS) == (kind[2] == "H")
    pool = np.flatnonzero(usable)
    if not len(pool):
        raise InvalidRequest(f"{table.name}: no request of {kind} with at most {longest} tokens")
    at = rng.choice(pool, count, replace=count > len(pool))
    return replace(
        table,
        name=str(kind),
        arrival_s=np.zeros(count),
        prompt_tokens=table.prompt_tokens[at],
        output_tokens=table.output_tokens[at],
        prefixes=None if table.prefixes is None else tuple(table.prefixes[row] for row in at.tolist()),
        answers=None if table.answers is None else tuple(table.answers[row] for row in at.tolist()),
        sessions=None,  # what is drawn are lengths and prompts, not conversations
    )


# Median and spread (of the logarithm) of the stand-ins, light and heavy. TetriInfer gives a median of 18 tokens for
# ShareGPT's short prompts (2.2.1) and of 128 for its answers (5.1); the rest is our guess.
_PROMPTS = ((18.0, 1.0), (800.0, 0.4))
_OUTPUTS = ((50.0, 0.8), (280.0, 0.5))


def _stand_in(kind: Tetri, count: int, rng: np.random.Generator, longest: int) -> Workload:
    max_output = longest // 4
    max_prompt = longest - max_output
    if max_output <= HEAVY_TOKENS or max_prompt <= HEAVY_PROMPT_TOKENS:
        raise InvalidRequest(f"longest_tokens must be at least 704 to have room for heavy requests, not {longest}")
    prompt_ranges = ((1, HEAVY_PROMPT_TOKENS), (HEAVY_PROMPT_TOKENS + 1, max_prompt))
    output_ranges = ((1, HEAVY_TOKENS), (HEAVY_TOKENS + 1, max_output))
    if kind is Tetri.MIXED:
        kinds = rng.integers(0, 4, count)
        heavy = (kinds // 2 == 1, kinds % 2 == 1)
    else:
        heavy = (np.full(count, kind[0] == "H"), np.full(count, kind[2] == "H"))
    prompts = _light_and_heavy(rng, heavy[0], _PROMPTS, prompt_ranges)
    outputs = _light_and_heavy(rng, heavy[1], _OUTPUTS, output_ranges)
    return Workload(f"{kind} (log-normal)", np.zeros(count), prompts, outputs)


def _light_and_heavy(
    rng: np.random.Generator,
    heavy: NDArray[np.bool_],
    shapes: tuple[tuple[float, float], ...],
    ranges: tuple[tuple[int, int], ...],
) -> Lengths:
    """Log-normal lengths, drawn again until they lie within the range of their sort."""
    lengths = np.empty(len(heavy), dtype=np.int64)
    for sort, ((median, spread), (low, high)) in enumerate(zip(shapes, ranges, strict=True)):
        here = heavy == bool(sort)
        count, kept = int(here.sum()), np.empty(0, dtype=np.int64)
        while len(kept) < count:
            more = np.rint(rng.lognormal(math.log(median), spread, 2 * (count - len(kept)))).astype(np.int64)
            kept = np.concatenate((kept, more[(more >= low) & (more <= high)]))
        lengths[here] = kept[:count]
    return lengths


def _lengths(rng: np.random.Generator, count: int, mean: float, cv: float) -> Lengths:
    if not cv >= 0:
        raise InvalidRequest(f"a coefficient of variation must be at least 0, not {cv}")
    if cv == 0:
        return np.full(count, max(1, round(mean)), dtype=np.int64)
    variance = math.log(1.0 + cv**2)
    drawn = rng.lognormal(math.log(mean) - variance / 2.0, math.sqrt(variance), count)
    return np.asarray(np.maximum(1.0, np.rint(drawn)), dtype=np.int64)


def _with_gaps(workload: Workload, gaps: NDArray[np.float64]) -> Workload:
    return workload.with_arrivals(np.concatenate(([0.0], np.cumsum(gaps))))


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise InvalidRequest(f"{name} must be positive, not {value}")


def conversations(count: int, seed: int = 0, per_s: float = 1.0) -> Workload:
    """`count` requests of chats whose turns repeat all that was said before, the answers included.

    Chats begin as a Poisson process, `per_s` a second, and share one system prompt. Those that began before the start
    are under way, so that about `TURNS_A_CHAT` times as many requests come in a second. A chat goes on after each turn
    with the probability `_GOES_ON`. The next message comes after the answer, taken to need `_ANSWER_S` a token, and a
    pause.
    """
    _require_positive(count=count, per_s=per_s)
    rng, size = np.random.default_rng(seed), _CHAT_BLOCK
    rows: list[tuple[float, int, int, tuple[int, ...], tuple[int, ...], str]] = []
    chats = 0
    system = list(range(_SYSTEM_TOKENS // size))
    begins_s, fresh = -_UNDER_WAY_S, len(system)
    times_s: list[float] = []  # of the requests since the start, in order
    while bisect_left(times_s, begins_s) < count:  # a chat that begins now may yet be among the first `count` requests
        at_s, tokens, ids = begins_s, _SYSTEM_TOKENS, list(system)
        chats += 1
        while True:
            tokens += int(_lengths(rng, 1, *_MESSAGE)[0])
            output = int(_lengths(rng, 1, *_ANSWER)[0])
            more = -(-tokens // size) - len(ids)
            ids, fresh = [*ids, *range(fresh, fresh + more)], fresh + more
            whole, filled = tokens // size, (tokens + output - 1) // size
            answer = range(fresh, fresh + filled - whole)
            fresh += len(answer)
            if at_s >= 0.0:
                insort(times_s, at_s)
                rows.append((at_s, tokens, output, tuple(ids), tuple(answer), f"chat-{chats}"))
            tokens += output
            ids = [*ids[:whole], *answer]
            if tokens > _CHAT_TOKENS or rng.random() > _GOES_ON:
                break
            at_s += output * _ANSWER_S + float(rng.exponential(_PAUSE_S))
        begins_s += float(rng.exponential(1.0 / per_s))
    rows.sort(key=lambda row: row[0])
    del rows[count:]
    arrival_s, prompts, outputs, prefixes, answers, sessions = zip(*rows, strict=True)
    return Workload(
        "chats",
        np.array(arrival_s),
        np.array(prompts, dtype=np.int64),
        np.array(outputs, dtype=np.int64),
        prefixes,
        size,
        answers,
        sessions=sessions,
    )


# Of `conversations`: tokens of the system prompt, of messages and answers (mean, coefficient of variation), and at most
# of a chat; the probability of a further turn, and the seconds before it; for how long chats have begun at the start.
_CHAT_BLOCK, _SYSTEM_TOKENS, _CHAT_TOKENS = 64, 1024, 12_000
_MESSAGE, _ANSWER = (400.0, 1.0), (300.0, 0.6)
_GOES_ON, _ANSWER_S, _PAUSE_S, _UNDER_WAY_S = 5.0 / 6.0, 0.03, 30.0, 600.0
TURNS_A_CHAT = 5.6  # on average, as measured

Arrivals = Callable[[Workload, float, int], Workload]

# How requests may arrive, by name: (workload, requests a second, seed).
ARRIVALS: dict[str, Arrivals] = {
    "trace": lambda workload, rate, seed: workload.at_rate(rate),
    "poisson": poisson,
    "even": lambda workload, rate, seed: evenly(workload, rate),
    "bursts": bursts,
    "on_off": on_off,
}

# Log-normal lengths with the means and variations of the public Azure traces of 2023 (all rows; CC-BY-4.0, Patel et
# al., Splitwise, ISCA 2024): prompt, output, and their coefficients of variation.
_LIKE = {"azure-conv": (1155.0, 211.0, 0.96, 0.77), "azure-code": (2048.0, 28.0, 0.96, 2.15)}
# Upper bounds: beyond them, drawn lengths outgrow the integers that hold them.
_MAX = {"prompt": 1e7, "output": 1e7, "prompt_cv": 100.0, "output_cv": 100.0, "longest": 2e7}
CHATS = "chats"
CHOICES = f"{', '.join((*_LIKE, *Tetri, CHATS))}, or lengths such as prompt=1000,output=200"


def is_made(words: str) -> bool:
    """Whether the words name a synthetic workload, rather than a trace file."""
    return words in _LIKE or words in list(Tetri) or words == CHATS or "=" in words


def made(words: str, count: int, seed: int, lengths: Workload | None = None) -> Workload:
    """The synthetic workload that the words name, or describe as `prompt=1000,output=200`: requests at time 0.

    lengths: token counts from which TetriInfer's workloads are drawn. Raises InvalidRequest that names the choices.
    """
    if words in _LIKE:
        prompt, output, prompt_cv, output_cv = _LIKE[words]
        like = synthetic(count, prompt, output, prompt_cv=prompt_cv, output_cv=output_cv, seed=seed)
        return replace(like, name=words)
    if words in list(Tetri):
        return tetri(words, count, seed, lengths)
    if words == CHATS:
        return conversations(count, seed)
    if "=" in words:
        return _of_lengths(words, count, seed)
    raise InvalidRequest(f"no synthetic workload {words!r}; known: {CHOICES}")


def _of_lengths(words: str, count: int, seed: int) -> Workload:
    values: dict[str, float] = {}
    for item in words.split(","):
        key, _, value = item.partition("=")
        key = key.strip()
        if key not in _MAX:
            raise InvalidRequest(f"workload {words!r}: no key {key!r}; known: {', '.join(_MAX)}")
        try:
            values[key] = float(value)
        except ValueError as error:
            raise InvalidRequest(f"workload {words!r}: {key} must be a number, not {value!r}") from error
        if not values[key] <= _MAX[key]:
            raise InvalidRequest(f"workload {words!r}: {key} must be at most {_MAX[key]:g}, not {value}")
    missing = [key for key in ("prompt", "output") if key not in values]
    if missing:
        raise InvalidRequest(f"workload {words!r}: {missing[0]} is missing")
    return synthetic(
        count,
        values["prompt"],
        values["output"],
        prompt_cv=values.get("prompt_cv", 0.0),
        output_cv=values.get("output_cv", 0.0),
        longest_tokens=int(max(0.0, values["longest"])) if "longest" in values else None,
        seed=seed,
    )


def of_class(workload: Workload, slo: Slo, caller: str = "") -> Workload:
    rows = np.zeros(len(workload), dtype=np.int64)
    return replace(workload, mix=Mix((slo,), rows, (caller,), rows))


def together(workloads: Sequence[Workload]) -> Workload:
    """All requests of several workloads, each with its mix, in order of arrival, without prefixes.

    Raises InvalidRequest for a workload without a mix.
    """
    mixes = [one.mix for one in workloads]
    classes: list[Slo] = []
    callers: list[str] = []
    class_of, caller_of = [], []
    for one, mix in zip(workloads, mixes, strict=True):
        if mix is None:
            raise InvalidRequest(f"{one.name}: requests without a class cannot be mixed with others")
        class_of.append(mix.class_of + len(classes))
        caller_of.append(mix.caller_of + len(callers))
        classes += mix.classes
        callers += mix.callers
    arrival_s = np.concatenate([one.arrival_s for one in workloads])
    order = np.argsort(arrival_s, kind="stable")
    return Workload(
        " + ".join(one.name for one in workloads),
        arrival_s[order],
        np.concatenate([one.prompt_tokens for one in workloads])[order],
        np.concatenate([one.output_tokens for one in workloads])[order],
        mix=Mix(tuple(classes), np.concatenate(class_of)[order], tuple(callers), np.concatenate(caller_of)[order]),
    )
