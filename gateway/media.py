"""Images and other media of prompts: which modalities a gateway serves, where it fetches items from, and what engines
receive of them.

vLLM's front end fetches, decodes and processes items, here in the gateway. Engines receive the processed data with each
job (`Generation.media`), whatever they have received before: a job may be computed on any of them.
"""

import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import requests
from urllib3.util import parse_url
from vllm.config import ModelConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import get_mm_max_toks_per_item
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.v1.serial_utils import MsgpackEncoder

from gateway.settings import GatewaySettings
from shared.domain.prompt import MODALITIES, MediaItem
from shared.errors import InvalidRequest
from shared.model.support import Config, note_on_torchvision
from shared.runtime.logs import get_log

log = get_log(__name__)
CONNECTOR = "polyphase"
TEXT = "this cluster processes only text: send text, without images, audio, video or embeddings"
# Of one prompt, unless `vllm_args: {limit_mm_per_prompt: …}` says otherwise.
MAX_ITEMS: Mapping[str, int] = {"image": 8, "audio": 1, "video": 1}
CACHE_GB = 0.25  # of processed items, so that an image of a long chat is not processed again with each turn
MAX_PIXELS = 16 << 20  # of an image as it arrives: 48 MiB once it is decoded, whatever its size in a file
_INLINE = 1 << 62  # vLLM's encoder keeps smaller tensors in the message


def prepare_environment(settings: GatewaySettings) -> None:
    """Set what vLLM reads from the environment about media, except where the operator has set it."""
    bodies_mb = -(-settings.max_body_bytes // (1 << 20))
    for name, value in (
        ("VLLM_MEDIA_CONNECTOR", CONNECTOR),
        ("VLLM_MEDIA_URL_ALLOW_REDIRECTS", 0),  # a redirect of an allowed host may lead anywhere
        ("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", bodies_mb),
        ("VLLM_MAX_IMAGE_PIXELS", MAX_PIXELS),
    ):
        os.environ.setdefault(name, str(value))


def with_limits(vllm_args: Mapping[str, Any]) -> dict[str, Any]:
    """Options of vLLM's server with a limit of items per prompt for each modality that they name none for."""
    name = "limit_mm_per_prompt"
    if any(each.startswith(f"{name}.") for each in vllm_args):  # these replace the option's own value
        return {**{f"{name}.{modality}": most for modality, most in MAX_ITEMS.items()}, **vllm_args}
    given = vllm_args.get(name) or {}
    named = json.loads(given) if isinstance(given, str) else given
    return {**vllm_args, name: {**MAX_ITEMS, **named}}


@dataclass(frozen=True, slots=True)
class Media:
    """The modalities that a gateway serves. why: for all others; why_each: for some of them."""

    served: frozenset[str] = frozenset()
    why: str = TEXT
    why_each: Mapping[str, str] = field(default_factory=dict)

    def refusal(self, modality: str) -> str:
        """Why items of this modality, as vLLM's chat parser calls it, are not served; empty where they are."""
        if modality.endswith("_embeds"):
            return self.why if not self.served else "embeddings are not served: send the image, sound or video itself"
        return "" if modality in self.served else self.why_each.get(modality, self.why)


def model_config(args: Any, source: Config) -> tuple[ModelConfig, Media]:
    """The configuration of the model that vLLM's arguments name, and the media that the gateway can process for it.
    source: the model's config.json.

    Where the model's processor does not load, the gateway serves the model's text. Raises InvalidRequest where vLLM's
    code for the model lacks torchvision.
    """
    config = _model_config(args, source)
    if not config.supports_multimodal_inputs:
        note = note_on_torchvision(source)
        return config, Media(why=f"{TEXT}; {note}" if note else TEXT)
    try:
        processor = MULTIMODAL_REGISTRY.create_processor(config)
        limits: Mapping[str, int] = processor.info.allowed_mm_limits
        served = frozenset(name for name in MODALITIES if limits.get(name, 0) > 0)
        get_mm_max_toks_per_item(processor, dict.fromkeys(served, 1), None)  # as vLLM does next
    except Exception as error:  # whatever a model's processor and the libraries below it raise
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
        log.warning("the model's processor does not load: its text alone is served", error=cause)
        args.language_model_only = True
        why = f"this cluster serves the text of this model alone, because its processor does not load: {cause}"
        return _model_config(args, source), Media(why=why)
    none = "this model has no such input" if served else TEXT
    zero = "the setting `vllm_args: {limit_mm_per_prompt: …}` allows none"
    return config, Media(served, none, dict.fromkeys(limits.keys() - served, zero))


def _model_config(args: Any, source: Config) -> ModelConfig:
    try:
        return AsyncEngineArgs.from_cli_args(args).create_model_config()
    except ValueError as error:
        if note := note_on_torchvision(source):
            raise InvalidRequest(f"model {args.model}: {error}; {note}") from error
        raise


@dataclass(frozen=True, slots=True)
class EncodedMedia:
    """The media items of a prompt, and their processed data."""

    items: tuple[MediaItem, ...]
    data: bytes


NO_MEDIA = EncodedMedia((), b"")


def encoded(features: Sequence[MultiModalFeatureSpec], max_bytes: int) -> EncodedMedia:
    """The items of a prompt for engines. Raises InvalidRequest for more than `max_bytes`."""
    (data,) = MsgpackEncoder(size_threshold=_INLINE).encode(list(features))
    if len(data) > max_bytes:
        raise InvalidRequest(
            f"the images and other media of the prompt come to {len(data)} bytes once they are processed, the limit is "
            f"{max_bytes}: send fewer or smaller ones (operators: `gateway: {{max_media_bytes: …}}`, or smaller images "
            "by `mm_processor_kwargs`)"
        )
    items = tuple(
        MediaItem(each.modality, each.identifier, each.mm_position.offset, each.mm_position.length) for each in features
    )
    return EncodedMedia(items, bytes(data))


@MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR)
class Fetcher(MediaConnector):  # type: ignore[misc]  # vLLM is untyped to mypy
    """vLLM's connector, which fetches only from hosts that the operator has named. Its errors name the item's URL.

    vLLM's own fetches from any host if none is named: clients could read what only the gateway can reach.
    """

    def load_from_url(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        with _named(url):
            self._check(url)
            return super().load_from_url(url, media_io, fetch_timeout=fetch_timeout)

    async def load_from_url_async(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        with _named(url):
            self._check(url)
            return await super().load_from_url_async(url, media_io, fetch_timeout=fetch_timeout)

    def _check(self, url: str) -> None:
        if url[:5].lower() == "data:":
            return
        scheme = parse_url(url).scheme or ""
        if scheme.startswith("http") and not self.allowed_media_domains:
            raise ValueError(
                "this gateway fetches nothing from other hosts: send a data: URL (operators: list hosts in "
                "`gateway: {vllm_args: {allowed_media_domains: […]}}`)"
            )
        if scheme == "file" and self.allowed_local_media_path is None:
            raise ValueError(
                "this gateway reads no files for clients: send a data: URL (operators: "
                "`gateway: {vllm_args: {allowed_local_media_path: …}}`)"
            )


# What fetching and decoding raise, as far as the item or its host is the cause.
_FAILURES = (
    ValueError,
    OSError,
    ImportError,  # of a library that decodes sounds or videos
    NotImplementedError,
    asyncio.TimeoutError,
    aiohttp.ClientError,
    requests.RequestException,
)


@contextmanager
def _named(url: str) -> Iterator[None]:
    """Turns failures in the block into errors for the client that name the item."""
    try:
        yield
    except VLLMClientError:
        raise
    except _FAILURES as error:
        shown = f"{url[:60]}…" if len(url) > 60 else url
        why = str(error) or type(error).__name__
        raise VLLMValidationError(f"the item {shown!r} cannot be used: {why}", parameter="url") from error
