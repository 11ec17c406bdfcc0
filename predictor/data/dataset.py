"""Builds a dataset: reads prompts, requests answers from the served model over the OpenAI API, journals each answer
so that an interrupted build resumes, and writes a Parquet file with the settings that produced it.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from predictor.data.examples import hash_of, prompt_of, records_in, split_of
from shared.errors import Conflict, InvalidRequest, PolyphaseError, Unavailable

CONNECT_S = 10.0
TRIES = 5  # of one answer, before the endpoint counts as away
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0
_AGAIN = (408, 409, 425, 429)  # and all from 500 on: the same question may be answered later
_SAID = 200  # characters of an error's text


class Api(StrEnum):
    """In which form prompts are sent."""

    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True)
class Asking:
    """How answers are asked for. base_url: with or without /v1. timeout_s: of one answer.

    temperature: None leaves it to the model. Every answer has a seed of its own, see `seed_of`.
    """

    base_url: str
    model: str = ""
    api: Api = Api.CHAT
    max_tokens: int = 1024
    temperature: float | None = None
    timeout_s: float = 120.0
    key: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """Lengths in the model's own tokens, the end token included. cut: it would have gone on beyond `max_tokens`."""

    prompt_tokens: int
    output_tokens: int
    cut: bool


class Refused(PolyphaseError):
    """The endpoint does not take this prompt, now or ever; the message is its own."""

    code = "refused"


def seed_of(prompt: str, sample: int) -> int:
    """Another one for each answer, and the same after a restart.

    Under one seed all prompts draw the same random numbers; at a high temperature the answers of unlike prompts then
    end at the same token.
    """
    return (hash_of(prompt) + sample) % 2**31


class Endpoint:
    """A client of one model. Use as an async context manager."""

    def __init__(self, asking: Asking, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._asking = asking
        url = asking.base_url.rstrip("/").removesuffix("/v1") + "/v1"
        headers = {"Authorization": f"Bearer {asking.key}"} if asking.key else {}
        timeout = httpx.Timeout(asking.timeout_s, connect=CONNECT_S)
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=timeout, limits=limits, transport=transport
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """The model that is asked: the one that was named, or the only one that is served.

        Raises Unavailable if the endpoint does not answer, InvalidRequest for a model that is not there.
        """
        response = await self._sent("GET", "/models", None)
        try:
            names = [str(one["id"]) for one in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise Unavailable(f"{self._http.base_url}models: not an OpenAI API: {response.text[:_SAID]}") from error
        wanted = self._asking.model
        if wanted and wanted not in names:
            raise InvalidRequest(f"model {wanted!r} is not served there; there are {', '.join(names) or 'none'}")
        if not wanted and len(names) != 1:
            raise InvalidRequest(f"--model: which one of {', '.join(names) or 'none'}?")
        return wanted or names[0]

    async def answer(self, model: str, prompt: str, sample: int) -> Answer:
        """The lengths of one answer. Raises Refused for this prompt, Unavailable when nothing helps."""
        asking = self._asking
        body: dict[str, Any] = {"model": model, "max_tokens": asking.max_tokens, "seed": seed_of(prompt, sample)}
        if asking.temperature is not None:
            body["temperature"] = asking.temperature
        if asking.api is Api.CHAT:
            path, body = "/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}
        else:
            path, body = "/completions", {**body, "prompt": prompt}
        return self._read(await self._sent("POST", path, body))

    def _read(self, response: httpx.Response) -> Answer:
        try:
            told = response.json()
            usage, reason = told["usage"], told["choices"][0]["finish_reason"]
            return Answer(int(usage["prompt_tokens"]), int(usage["completion_tokens"]), reason == "length")
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise Unavailable(
                f"{response.request.url}: no lengths in the answer ({type(error).__name__}: {error}): "
                f"{response.text[:_SAID]}"
            ) from error

    async def _sent(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """A success. What may pass is tried again, with growing pauses."""
        wrong = hint = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)))
            try:
                response = await self._http.request(method, path, json=body)
            except httpx.TimeoutException:
                wrong = f"no answer in {self._asking.timeout_s:g} s"
                hint = " (a longer --timeout or a lower --concurrency may help)"
                continue
            except httpx.HTTPError as error:
                wrong = f"{type(error).__name__}: {error}"
                continue
            if response.is_success:
                return response
            wrong = f"HTTP {response.status_code}: {_error_of(response)}"
            if response.status_code in (401, 403):
                raise InvalidRequest(f"{response.request.url}: {wrong}")
            if response.status_code < 500 and response.status_code not in _AGAIN:
                raise Refused(wrong)
        raise Unavailable(f"{self._http.base_url}{path.removeprefix('/')}: {wrong}, {TRIES} times{hint}")


def _error_of(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])[:_SAID]
    except (ValueError, KeyError, TypeError):
        return response.text[:_SAID]


JOURNAL_FILE, SETTINGS = "answers.jsonl", "settings.json"


class Line(msgspec.Struct, frozen=True):
    """An answer to sample `sample` of a prompt, or why there is none (`refused`; the lengths are 0 then)."""

    prompt: str
    sample: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    cut: bool = False
    refused: str = ""

    @property
    def key(self) -> tuple[str, int]:
        """What it answers."""
        return self.prompt, self.sample


class Journal:
    """A folder's journal. Raises Conflict when the folder was begun under other settings, naming what differs.

    A line that a kill has cut short is dropped: its answer is asked for again. One process writes at a time.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / JOURNAL_FILE).open("a+b")
        try:
            self._lock()
            _agree(folder / SETTINGS, settings)
            self.lines = self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, line: Line) -> None:
        """Keep it: it is the system's when this returns, whatever becomes of the process."""
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        self.lines[line.key] = line

    def _lock(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Conflict(f"{self.folder}: another process is building this dataset") from error

    def _read(self) -> dict[tuple[str, int], Line]:
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self._file.fileno(), len(whole))
        found = {}
        for number, text in enumerate(whole.splitlines(), start=1):
            try:
                line = msgspec.json.decode(text, type=Line)
            except msgspec.DecodeError as error:
                raise InvalidRequest(f"{self.folder / JOURNAL_FILE}, line {number}: {error}") from error
            found[line.key] = line
        return found


def _agree(path: Path, settings: dict[str, Any]) -> None:
    if not path.exists():
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        fresh.replace(path)
        return
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequest(f"{path}: {error}") from error
    differ = [key for key in {**known, **settings} if known.get(key) != settings.get(key)]
    if differ:
        said = ", ".join(f"{key} was {known.get(key)!r} and is {settings.get(key)!r}" for key in differ)
        raise Conflict(f"{path.parent} was begun under other settings: {said}. Take another folder, or those.")


TABLE_FILE = "dataset.parquet"
_KEY = b"polyphase"


def write_table(folder: Path, lines: Sequence[Line], settings: dict[str, Any]) -> Path:
    """Rows in the order of their prompts' hashes: prompt, sample, prompt_tokens, output_tokens, cut, split."""
    import pyarrow
    import pyarrow.parquet

    columns = {
        "prompt": pyarrow.array([line.prompt for line in lines], pyarrow.string()),
        "sample": pyarrow.array([line.sample for line in lines], pyarrow.int32()),
        "prompt_tokens": pyarrow.array([line.prompt_tokens for line in lines], pyarrow.int32()),
        "output_tokens": pyarrow.array([line.output_tokens for line in lines], pyarrow.int32()),
        "cut": pyarrow.array([line.cut for line in lines], pyarrow.bool_()),
        "split": pyarrow.array([split_of(line.prompt) for line in lines], pyarrow.string()),
    }
    table = pyarrow.table(columns).replace_schema_metadata({_KEY: json.dumps(settings).encode()})
    path, fresh = folder / TABLE_FILE, folder / f".{TABLE_FILE}.new"
    pyarrow.parquet.write_table(table, fresh)
    fresh.replace(path)
    return path


def settings_of(path: Path) -> dict[str, Any]:
    """What a file of `write_table` was made under; nothing for another file."""
    import pyarrow.parquet

    told = (pyarrow.parquet.read_schema(path).metadata or {}).get(_KEY)
    found: dict[str, Any] = json.loads(told) if told else {}
    return found


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
