"""Builds a dataset: prompts out of files, answers from the model that is served; goes on where it was killed."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from predictor.data.endpoint import Asking, Endpoint, Refused
from predictor.data.examples import hash_of, split_of
from predictor.data.journal import Journal, Line
from predictor.data.records import prompt_of, records_in
from predictor.data.table import write_table
from shared.errors import InvalidRequest, Unavailable

NAMED = 5  # records that a message names


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts without duplicates, by their hashes, and records that have none: where they stand, and why."""

    texts: tuple[str, ...]
    duplicates: int
    bad: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """samples: answers of each prompt to train on. held_out_samples: of each that is held out; 0: as many.
    limit: prompts at most, 0 for all; the same ones every time. concurrency: asked at once.
    """

    asking: Asking
    samples: int = 1
    held_out_samples: int = 0
    limit: int = 0
    concurrency: int = 16


@dataclass(frozen=True, slots=True)
class Built:
    """What a builder has made. refused: by reason, how many answers the endpoint would not give. lengths: 5th
    percentile, median and 95th percentile of the answers, in tokens.
    """

    path: Path
    rows: int
    asked: int
    cut: int
    refused: Counter[str]
    lengths: tuple[int, int, int]


Tell = Callable[[int, int], None]  # answers so far, and in all


def read_prompts(paths: Sequence[Path]) -> Prompts:
    """Raises InvalidRequest for a file that cannot be read, or where no record has a prompt."""
    found: dict[str, None] = {}
    bad, records = [], 0
    for record in records_in(paths):
        records += 1
        try:
            text = prompt_of(record.content)
            if not text.strip():
                raise ValueError("the prompt is empty")
            text.encode()
        except (TypeError, ValueError) as error:
            bad.append(f"{record.where}: {error}")
            continue
        found[text] = None
    if not found:
        raise InvalidRequest(f"no prompts in {', '.join(map(str, paths))}" + (f": {bad[0]}" if bad else ""))
    return Prompts(tuple(sorted(found, key=hash_of)), records - len(bad) - len(found), tuple(bad))


async def build(prompts: Prompts, wanted: Wanted, folder: Path, tell: Tell, endpoint: Endpoint | None = None) -> Built:
    """Ask for what the folder's journal lacks, then write the Parquet file.

    What was answered is kept when this ends early: run it again. Raises Unavailable when the endpoint stays away,
    InvalidRequest, and Conflict for a folder that was begun under other settings.
    """
    texts = prompts.texts[: wanted.limit or None]
    async with endpoint or Endpoint(wanted.asking) as asks:
        model = await asks.model()
        settings = _settings(wanted, model)
        with Journal(folder, settings) as journal:
            keys = [(text, sample) for text in texts for sample in range(_samples(wanted, text))]
            left = [key for key in keys if key not in journal.lines]
            others = len(journal.lines) - (len(keys) - len(left))  # of prompts that are not asked for this time

            def told() -> None:
                tell(len(journal.lines) - others, len(keys))

            told()
            await _ask_all(asks, model, left, journal, wanted.concurrency, told)
            return _stored(folder, [journal.lines[key] for key in keys], len(left), settings, len(texts))


def _samples(wanted: Wanted, prompt: str) -> int:
    return wanted.samples if split_of(prompt) == "train" else wanted.held_out_samples or wanted.samples


def _stored(folder: Path, lines: Sequence[Line], asked: int, settings: dict[str, Any], prompts: int) -> Built:
    answered = [line for line in lines if not line.refused]
    refused = Counter(line.refused for line in lines if line.refused)
    if not answered:
        raise InvalidRequest(f"{settings['model']} gave no answer at all: {refused.most_common(1)[0][0]}")
    path = write_table(folder, answered, {**settings, "prompts": prompts, "refused": refused.total()})
    ordered = sorted(line.output_tokens for line in answered)
    low, middle, high = (ordered[int(share * (len(ordered) - 1))] for share in (0.05, 0.5, 0.95))
    return Built(path, len(answered), asked, sum(line.cut for line in answered), refused, (low, middle, high))


def _settings(wanted: Wanted, model: str) -> dict[str, Any]:
    asking = asdict(wanted.asking)
    kept = {key: asking[key] for key in ("api", "max_tokens", "temperature")}
    return {"model": model, **kept, "samples": wanted.samples, "held_out_samples": wanted.held_out_samples}


async def _ask_all(
    asks: Endpoint,
    model: str,
    left: Sequence[tuple[str, int]],
    journal: Journal,
    concurrency: int,
    told: Callable[[], None],
) -> None:
    """Each worker takes the next; the first that cannot go on ends all."""
    todo = iter(left)

    async def work() -> None:
        for prompt, sample in todo:
            try:
                answer = await asks.answer(model, prompt, sample)
                line = Line(prompt, sample, answer.prompt_tokens, answer.output_tokens, answer.cut)
            except Refused as refusal:
                line = Line(prompt, sample, refused=refusal.message)
            journal.add(line)
            told()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(left))):
                group.create_task(work())
    except* Unavailable as errors:
        raise _first(errors) from None
    except* InvalidRequest as errors:
        raise _first(errors) from None


def _first(errors: BaseExceptionGroup[Any]) -> BaseException:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
