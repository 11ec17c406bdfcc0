"""The files of a model: a folder, or a name on the Hugging Face hub, whose weights are downloaded before the load.

`huggingface_hub` reads HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE. It is imported where it is needed, since the
import takes a third of a second. No message contains a token.
"""

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from shared.errors import InvalidRequest, PolyphaseError, Unavailable
from shared.files.text import read_json
from shared.model.folder import fault_of_folder
from shared.model.support import config_of, fault_of_remote_code
from shared.model.weights import fault_of_weights

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Set by the process that starts this one: the file to which the progress of a download is written.
DOWNLOAD_FILE = "POLYPHASE_DOWNLOAD_FILE"
SAMPLE_S = 1.0  # between two measurements of a download
IGNORED = "original/**/*"  # vLLM's default of `ignore_patterns`
_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_ANY_FORMAT = ("*.safetensors", "*.bin", "*.pt")
# What vLLM downloads of a repository, by its `load_format`: the first pattern that matches. Other formats are loaded
# without our download.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "auto": _ANY_FORMAT,
    "hf": _ANY_FORMAT,
    "safetensors": ("*.safetensors",),
    "mistral": ("consolidated*.safetensors",),
    "pt": ("*.pt",),
}
FILE_FORMATS = frozenset(_PATTERNS)  # whose weights must be in the model's folder


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as the settings name it. Empty fields: as the environment and `huggingface_hub` have them."""

    model: str  # a folder or a name on the hub
    revision: str = ""
    token: str = field(default="", repr=False)
    endpoint: str = ""
    weights_cache: str = ""  # `download_dir`

    @property
    def folder(self) -> Path | None:
        """The folder, if the model is not a name."""
        path = Path(self.model)
        return path if path.is_absolute() or os.path.isdir(path) else None

    @property
    def on_hub(self) -> bool:
        """Whether the Hugging Face hub is asked for it; other sources are vLLM's (ModelScope, object stores)."""
        modelscope = os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true")
        return self.folder is None and HUB_NAME.fullmatch(self.model) is not None and not modelscope

    @property
    def hub(self) -> str:
        """The address of the hub."""
        return self.endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `huggingface_hub` that name the revision and how the hub is reached."""
        return {"revision": self.revision or None, "token": self.token or None, "endpoint": self.hub}


def source_of(model: str, options: Mapping[str, Any]) -> ModelSource:
    """The source of a model with these options of vLLM."""
    given = {name.replace("-", "_"): value for name, value in options.items() if isinstance(value, str)}
    return ModelSource(
        model, given.get("revision", ""), given.get("hf_token", ""), weights_cache=given.get("download_dir", "")
    )


@dataclass(frozen=True, slots=True)
class Download:
    """How far the download of a model's weights is."""

    done_bytes: int
    total_bytes: int

    def __str__(self) -> str:
        unit, name = (1e9, "GB") if self.total_bytes >= 1e9 else (1e6, "MB")
        return f"{self.done_bytes / unit:.1f} of {self.total_bytes / unit:.1f} {name}"

    def write(self, file: Path) -> None:
        """Replace the file atomically."""
        fresh = file.with_name(f"{file.name}.{os.getpid()}")
        fresh.write_text(f"{self.done_bytes} {self.total_bytes}\n")
        fresh.replace(file)

    @classmethod
    def read(cls, file: Path) -> "Download | None":
        """What `write` wrote; None without a file."""
        try:
            done, total = map(int, file.read_text().split())
        except (OSError, ValueError):
            return None
        return cls(done, total)


def read_config(source: ModelSource, *, trust_remote_code: bool) -> dict[str, Any]:
    """The model's config.json, with the quantisation of a file beside it; empty where the hub has none.

    Raises InvalidRequest or Unavailable, which state what to do, for a model that is out of reach, a folder without
    config.json, and a model that needs code of its own without `trust_remote_code`.
    """
    if (folder := source.folder) is not None:
        if fault := fault_of_folder(folder, tokenizer=False, weights=False):
            raise InvalidRequest(fault)
        config = config_of(folder)
    else:
        config = _config_of_hub(source) if source.on_hub else {}
    if fault := fault_of_remote_code(config, trust_remote_code):
        raise InvalidRequest(f"{source.model}: {fault}")
    return config


def check_weights(folder: Path) -> None:
    """Raises InvalidRequest for a folder whose weights are missing or incomplete."""
    if fault := fault_of_weights(folder):
        raise InvalidRequest(fault)


def fetch_weights(
    source: ModelSource,
    load_format: str,
    ignore: str | Sequence[str] | None,
    progress: Callable[[Download], None],
    sample_s: float = SAMPLE_S,
) -> None:
    """Download the weights of a model on the hub, as far as they are not in the cache.

    ignore: patterns of files that are not loaded. progress: called from another thread, first immediately, then
    whenever the download has gone on; not called if there is nothing to download. Raises InvalidRequest, Unavailable.
    """
    if not source.on_hub or load_format not in _PATTERNS or _offline():
        return
    from huggingface_hub import snapshot_download

    try:
        files = _weight_files(source, load_format, ignore)
    except PolyphaseError:
        if (cached := _cached_snapshot(source)) is None or fault_of_weights(cached):
            raise
        return
    blobs = _Blobs(source, files)
    if blobs.downloaded == blobs.total:
        return
    with explaining(source, blobs), _sampled(blobs, progress, sample_s):
        names = [file.rfilename for file in files]
        folder = snapshot_download(
            source.model,
            allow_patterns=names,
            tqdm_class=_no_bar(),
            cache_dir=source.weights_cache or None,
            **source.arguments,
        )
    check_weights(Path(folder))


@contextmanager
def explaining(source: ModelSource, blobs: "_Blobs | None" = None) -> Iterator[None]:
    """Raises InvalidRequest or Unavailable for any error of `huggingface_hub` in the block."""
    try:
        yield
    except _errors() as error:
        raise _explained(error, source, blobs) from error


def _errors() -> tuple[type[Exception], ...]:
    """What `huggingface_hub` raises. Its HTTP library differs by version: HfHubHTTPError derives from its errors."""
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, ValueError, RuntimeError, *(each for each in HfHubHTTPError.__bases__ if each is not OSError))


def _explained(error: Exception, source: ModelSource, blobs: "_Blobs | None") -> PolyphaseError:
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    model, hub = source.model, _shown(source.hub)
    page, has_token = f"{hub}/{model}", bool(source.token or get_token())
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    if isinstance(error, GatedRepoError) or status == 403:
        why = "the account of HF_TOKEN has no access to it" if has_token else "HF_TOKEN is not set"
        return InvalidRequest(
            f"{model} is a gated model, and {why}: request access at {page}, and set HF_TOKEN to a token of an account "
            "that has access"
        )
    if isinstance(error, RevisionNotFoundError):
        return InvalidRequest(f"{model} has no revision {source.revision!r}: choose one of {page}/tree/main")
    if isinstance(error, RepositoryNotFoundError):
        return InvalidRequest(
            f"{model} is neither a folder here nor a model of {hub}, unless it is private: check the name, or set "
            "HF_TOKEN to a token of an account that may read it"
        )
    if status == 401:
        return InvalidRequest(f"{hub} refuses HF_TOKEN: create another token at {hub}/settings/tokens")
    if blobs is not None:
        done = Download(blobs.downloaded, blobs.total)
        return Unavailable(
            f"the download of {model} from {hub} broke off after {done} ({_cause(error)}): start again; complete files "
            "are kept"
        )
    cache = constants.HF_HUB_CACHE
    if _offline():
        return InvalidRequest(
            f"{model} is not in {cache}, and HF_HUB_OFFLINE is set: unset it, or run `hf download {model}` first"
        )
    reason = error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error
    return Unavailable(
        f"{model} is neither a folder here nor in {cache}, and {hub} cannot be reached ({_cause(reason)}): check the "
        "internet connection, or give the folder of a model on this machine"
    )


def _cause(error: BaseException) -> str:
    """The type and the first line of an error; without a line that has a URL, which may have a password."""
    line = str(error).strip().partition("\n")[0]
    return type(error).__name__ if "@" in line or not line else f"{type(error).__name__}: {line}"


def _shown(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


def _offline() -> bool:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in names)


def _config_of_hub(source: ModelSource) -> dict[str, Any]:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import RemoteEntryNotFoundError

    arguments, offline = source.arguments, _offline()
    with explaining(source):
        if not offline:
            at = {name: arguments[name] for name in ("revision", "endpoint")}
            url = hf_hub_url(source.model, _CONFIG, **at)
            try:  # first, since the download retries for half a minute where there is no connection
                get_hf_file_metadata(url, token=arguments["token"], endpoint=arguments["endpoint"])
            except RemoteEntryNotFoundError:  # such as a repository in Mistral's format, which vLLM reads
                return {}
            except _errors():
                if config := cached_config(source.model, source.revision):
                    return config
                raise
        file = hf_hub_download(source.model, _CONFIG, local_files_only=offline, **arguments)
    return config_of(Path(file).parent)


def cached_config(model: str, revision: str = "") -> dict[str, Any]:
    """The config.json of a name on the hub that is in this machine's cache; empty if it is not."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, _CONFIG, revision=revision or None)
    return config_of(Path(found).parent) if isinstance(found, str) else {}


def _weight_files(source: ModelSource, load_format: str, ignore: str | Sequence[str] | None) -> "list[RepoSibling]":
    """Those that vLLM downloads: of the index where there is one, else of the first format that the repository has."""
    from huggingface_hub import HfApi, hf_hub_download

    with explaining(source):
        api = HfApi(endpoint=source.hub, token=source.token or None)
        # Unlike the listing of a tree, it does not retry for half a minute where there is no connection.
        found = api.model_info(source.model, revision=source.revision or None, files_metadata=True)
        files = {each.rfilename: each for each in found.siblings or ()}
        top = [name for name in files if "/" not in name]
        if load_format == "auto" and any(fnmatch(name, "consolidated*.safetensors") for name in top):
            load_format = "mistral"
        patterns = _PATTERNS[load_format]
        if "*.safetensors" in patterns and _INDEX in top:
            cache = source.weights_cache or None
            index = read_json(Path(hf_hub_download(source.model, _INDEX, cache_dir=cache, **source.arguments)))
            wanted = [_INDEX, *sorted(set(index.get("weight_map", {}).values()))]
            if missing := [name for name in wanted if name not in files]:
                raise InvalidRequest(f"{source.model}: the repository lacks {', '.join(missing[:8])}")
            return [files[name] for name in wanted]
        matching = next((p for p in patterns if any(fnmatch(name, p) for name in top)), None)
        if matching is None:
            raise InvalidRequest(f"{source.model}: the repository has no weights ({', '.join(patterns)})")
        ignored = [ignore] if isinstance(ignore, str) else list(ignore or ())
        return [
            file
            for name, file in files.items()
            if fnmatch(name, matching) and not any(fnmatch(name, pattern) for pattern in ignored)
        ]


def _cache_of(source: ModelSource) -> Path:
    """The folder of the model's weights in the cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    name = repo_folder_name(repo_id=source.model, repo_type="model")
    return Path(source.weights_cache or constants.HF_HUB_CACHE) / name


def _cached_snapshot(source: ModelSource) -> Path | None:
    """The cached files of the model's revision, which may be a few of them; None if there are none."""
    cache, revision = _cache_of(source), source.revision or "main"
    try:
        commit = (cache / "refs" / revision).read_text()
    except OSError:
        commit = revision
    folder = cache / "snapshots" / commit
    return folder if folder.is_dir() else None


class _Blobs:
    """The files of a download in the cache, also while another process downloads them."""

    def __init__(self, source: ModelSource, files: "Sequence[RepoSibling]") -> None:
        self._folder = _cache_of(source) / "blobs"
        self._sizes = {
            (file.lfs.sha256 if file.lfs is not None else str(file.blob_id)): file.size or 0 for file in files
        }
        self.total = sum(self._sizes.values())

    @property
    def downloaded(self) -> int:
        return sum(min(size, self._bytes_of(blob)) for blob, size in self._sizes.items())

    def _bytes_of(self, blob: str) -> int:
        """Of a blob, or of the newest file in which it is being downloaded."""
        try:
            if (whole := self._folder / blob).exists():
                return whole.stat().st_size
            parts = [each.stat() for each in self._folder.glob(f"{blob}*.incomplete")]
        except OSError:  # it was renamed meanwhile
            return 0
        return max(parts, key=lambda each: each.st_mtime_ns).st_size if parts else 0


@contextmanager
def _sampled(blobs: _Blobs, progress: Callable[[Download], None], sample_s: float) -> Iterator[None]:
    """Report the progress within the block, and a last time at its end."""
    over = threading.Event()

    def sample() -> None:
        last = -1
        while True:
            ended = over.wait(sample_s if last >= 0 else 0.0)
            if (done := blobs.downloaded) != last:
                progress(Download(done, blobs.total))
                last = done
            if ended:
                return

    thread = threading.Thread(target=sample, name="download progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _no_bar() -> Any:
    """A class of progress bars that write nothing: several processes share a terminal, or write to logs."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})

    return Silent
