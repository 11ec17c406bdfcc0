"""Builds a dataset: reads prompts, requests answers of the served model over the OpenAI API, and writes their lengths
to a Parquet file with the settings that produced it. A journal keeps each answer, so that an interrupted build resumes.
"""

import asyncio
import fcntl
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

from predictor.examples import hash_of, prompt_of, records_in, split_of
from shared.errors import Conflict, InvalidRequest, PolyphaseError, Unavailable

CONNECT_S = 10.0
TRIES = 5  # of one request, before the endpoint counts as unavailable
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 20.0  # between tries; each pause is twice the one before
JOURNAL_FILE, SETTINGS_FILE, TABLE_FILE = "answers.jsonl", "settings.json", "dataset.parquet"
_RETRIED = (408, 409, 425, 429)  # statuses of temporary failures, beside those from 500 on
_ERROR_CHARACTERS = 200
_METADATA_KEY = b"polyphase"


class Api(StrEnum):
    """The route that prompts are sent to."""

    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True)
class Target:
    """The model that answers, and how it is requested. base_url: with or without /v1. timeout_s: of one answer.
    temperature: None is the model's default.
    """

    base_url: str
    model: str = ""
    api: Api = Api.CHAT
    max_tokens: int = 1024
    temperature: float | None = None
    timeout_s: float = 120.0
    key: str = ""


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """samples: answers for each prompt of the training split; held_out_samples: for each of the other splits, 0: as
    many. limit: number of prompts, 0 for all. concurrency: requests at the same time.
    """

    target: Target
    samples: int = 1
    held_out_samples: int = 0
    limit: int = 0
    concurrency: int = 16

    def samples_of(self, prompt: str) -> int:
        return self.samples if split_of(prompt) == "train" else self.held_out_samples or self.samples

    def recorded(self, model: str) -> dict[str, object]:
        """The settings that the answers depend on."""
        target = {
            key: value for key, value in asdict(self.target).items() if key in ("api", "max_tokens", "temperature")
        }
        return {"model": model, **target, "samples": self.samples, "held_out_samples": self.held_out_samples}


class Answer(msgspec.Struct, frozen=True):
    """The lengths of an answer in the model's own tokens, with the end token: a line of the journal. cut: the answer
    ended at `max_tokens`. refused: the endpoint's reason for no answer; the lengths are then 0.
    """

    prompt: str
    sample: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    cut: bool = False
    refused: str = ""


class Refused(PolyphaseError):
    """The endpoint will not answer this prompt; the message is the endpoint's."""

    code = "refused"


def seed_of(prompt: str, sample: int) -> int:
    """A different seed for each answer, and the same after a restart.

    Under one seed all prompts draw the same random numbers; at a high temperature the answers of different prompts then
    end at the same token.
    """
    return (hash_of(prompt) + sample) % 2**31


class Endpoint:
    """A client of one model; an async context manager."""

    def __init__(self, target: Target, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._target = target
        self._http = httpx.AsyncClient(
            base_url=target.base_url.rstrip("/").removesuffix("/v1") + "/v1",
            headers={"Authorization": f"Bearer {target.key}"} if target.key else {},
            timeout=httpx.Timeout(target.timeout_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """The named model, or the only one that is served.

        Raises Unavailable if the endpoint does not answer, InvalidRequest for a model that is not served.
        """
        response = await self._request("GET", "/models", None)
        try:
            names = [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            text = response.text[:_ERROR_CHARACTERS]
            raise Unavailable(f"{self._http.base_url}models: not an OpenAI API: {text}") from error
        wanted, served = self._target.model, ", ".join(names) or "none"
        if wanted and wanted not in names:
            raise InvalidRequest(f"model {wanted!r} is not served there; served models: {served}")
        if not wanted and len(names) != 1:
            raise InvalidRequest(f"--model is required; served models: {served}")
        return wanted or names[0]

    async def answer(self, model: str, prompt: str, sample: int) -> Answer:
        """The lengths of one answer. Raises Refused for this prompt, Unavailable when no retry helped."""
        target = self._target
        body: dict[str, object] = {"model": model, "max_tokens": target.max_tokens, "seed": seed_of(prompt, sample)}
        if target.temperature is not None:
            body["temperature"] = target.temperature
        if target.api is Api.CHAT:
            path, body = "/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}
        else:
            path, body = "/completions", {**body, "prompt": prompt}
        response = await self._request("POST", path, body)
        try:
            answer = response.json()
            usage, reason = answer["usage"], answer["choices"][0]["finish_reason"]
            lengths = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
            return Answer(prompt, sample, *lengths, cut=reason == "length")
        except (ValueError, KeyError, TypeError, IndexError) as error:
            reason, text = f"{type(error).__name__}: {error}", response.text[:_ERROR_CHARACTERS]
            raise Unavailable(f"{response.request.url}: no lengths in the answer ({reason}): {text}") from error

    async def _request(self, method: str, path: str, body: dict[str, object] | None) -> httpx.Response:
        """A successful response; temporary failures are retried with growing pauses."""
        failure = hint = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)))
            try:
                response = await self._http.request(method, path, json=body)
            except httpx.TimeoutException:
                failure = f"no answer in {self._target.timeout_s:g} s"
                hint = " (a longer --timeout or a lower --concurrency may help)"
                continue
            except httpx.HTTPError as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if response.is_success:
                return response
            failure = f"HTTP {response.status_code}: {_error_message(response)}"
            if response.status_code in (401, 403):
                raise InvalidRequest(f"{response.request.url}: {failure}")
            if response.status_code < 500 and response.status_code not in _RETRIED:
                raise Refused(failure)
        raise Unavailable(f"{self._http.base_url}{path.removeprefix('/')}: {failure}, {TRIES} times{hint}")


def _error_message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])[:_ERROR_CHARACTERS]
    except (ValueError, KeyError, TypeError):
        return response.text[:_ERROR_CHARACTERS]


class Journal:
    """The answers in a folder, by prompt and sample; a context manager, for one process at a time.

    Raises Conflict when another process has the folder, or when it was begun under other settings. A line that a kill
    has cut short is dropped, and its answer requested again.
    """

    def __init__(self, folder: Path, settings: dict[str, object]) -> None:
        self._path = folder / JOURNAL_FILE
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+b")
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise Conflict(f"{folder}: another process is building this dataset") from error
            _check_settings(folder / SETTINGS_FILE, settings)
            self.answers = self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, answer: Answer) -> None:
        """Write an answer; it survives the end of the process."""
        self._file.write(msgspec.json.encode(answer) + b"\n")
        self._file.flush()
        self.answers[answer.prompt, answer.sample] = answer

    def _read(self) -> dict[tuple[str, int], Answer]:
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self._file.fileno(), len(whole))
        found = {}
        for number, text in enumerate(whole.splitlines(), start=1):
            try:
                answer = msgspec.json.decode(text, type=Answer)
            except msgspec.DecodeError as error:
                raise InvalidRequest(f"{self._path}, line {number}: {error}") from error
            found[answer.prompt, answer.sample] = answer
        return found


def _check_settings(path: Path, settings: dict[str, object]) -> None:
    """Write the settings of a new folder; compare those of a known one."""
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
        changes = ", ".join(f"{key} was {known.get(key)!r} and is {settings.get(key)!r}" for key in differ)
        raise Conflict(
            f"{path.parent} was begun under other settings: {changes}. Use another folder or those settings."
        )


def write_table(folder: Path, answers: Sequence[Answer], settings: dict[str, object]) -> Path:
    """Columns prompt, sample, prompt_tokens, output_tokens, cut and split, in the order of the answers."""
    import pyarrow
    import pyarrow.parquet

    types = {
        "prompt": pyarrow.string(),
        "sample": pyarrow.int32(),
        "prompt_tokens": pyarrow.int32(),
        "output_tokens": pyarrow.int32(),
        "cut": pyarrow.bool_(),
    }
    columns = {name: pyarrow.array([getattr(each, name) for each in answers], kind) for name, kind in types.items()}
    columns["split"] = pyarrow.array([split_of(each.prompt) for each in answers], pyarrow.string())
    table = pyarrow.table(columns).replace_schema_metadata({_METADATA_KEY: json.dumps(settings).encode()})
    path, fresh = folder / TABLE_FILE, folder / f".{TABLE_FILE}.new"
    pyarrow.parquet.write_table(table, fresh)
    fresh.replace(path)
    return path


def settings_of(path: Path) -> dict[str, object]:
    """The settings in a file of `write_table`; empty for another file."""
    import pyarrow.parquet

    metadata = (pyarrow.parquet.read_schema(path).metadata or {}).get(_METADATA_KEY)
    found: dict[str, object] = json.loads(metadata) if metadata else {}
    return found


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts without duplicates, ordered by hash. bad: records without a prompt, and why."""

    texts: tuple[str, ...]
    duplicates: int
    bad: tuple[str, ...]


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


@dataclass(frozen=True, slots=True)
class BuildResult:
    """requested: answers requested in this run. refused: counts by reason. lengths: 5th percentile, median and 95th
    percentile of the answers, in tokens.
    """

    path: Path
    rows: int
    requested: int
    cut: int
    refused: Counter[str]
    lengths: tuple[int, int, int]


async def build(
    prompts: Prompts, settings: BuildSettings, folder: Path, on_progress: Callable[[int, int], None]
) -> BuildResult:
    """Request the answers that the journal lacks, then write the Parquet file. Answers are kept when this ends early.

    on_progress: number of answers so far, and of all. Raises Unavailable when the endpoint stays unavailable,
    InvalidRequest, and Conflict (see `Journal`).
    """
    texts = prompts.texts[: settings.limit or None]
    async with Endpoint(settings.target) as endpoint:
        model = await endpoint.model()
        recorded = settings.recorded(model)
        with Journal(folder, recorded) as journal:
            keys = [(text, sample) for text in texts for sample in range(settings.samples_of(text))]
            missing = [key for key in keys if key not in journal.answers]
            other = len(journal.answers) - (len(keys) - len(missing))  # answers to prompts beyond the limit

            def report() -> None:
                on_progress(len(journal.answers) - other, len(keys))

            report()
            await _request_all(endpoint, model, missing, journal, settings.concurrency, report)
            answers = [journal.answers[key] for key in keys]
    answered = [answer for answer in answers if not answer.refused]
    refused = Counter(answer.refused for answer in answers if answer.refused)
    if not answered:
        raise InvalidRequest(f"{model} gave no answer at all: {refused.most_common(1)[0][0]}")
    path = write_table(folder, answered, {**recorded, "prompts": len(texts), "refused": refused.total()})
    ordered = sorted(answer.output_tokens for answer in answered)
    low, middle, high = (ordered[int(share * (len(ordered) - 1))] for share in (0.05, 0.5, 0.95))
    cut = sum(answer.cut for answer in answered)
    return BuildResult(path, len(answered), len(missing), cut, refused, (low, middle, high))


async def _request_all(
    endpoint: Endpoint,
    model: str,
    missing: Sequence[tuple[str, int]],
    journal: Journal,
    concurrency: int,
    report: Callable[[], None],
) -> None:
    """Workers take the keys in turn; the first error that is not of one prompt ends them all."""
    todo = iter(missing)

    async def work() -> None:
        for prompt, sample in todo:
            try:
                answer = await endpoint.answer(model, prompt, sample)
            except Refused as refusal:
                answer = Answer(prompt, sample, refused=refusal.message)
            journal.add(answer)
            report()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(missing))):
                group.create_task(work())
    except* (Unavailable, InvalidRequest) as errors:
        raise _first_error(errors) from None


def _first_error(errors: BaseExceptionGroup[Any]) -> BaseException:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
