"""The LoRA adapters that are served as models: those of the cluster file, and those that operators load at run time.

The cluster monitor owns the latter; gateways reach it through the schedulers. A gateway reports which set of adapters
it serves and which adapters its requests have, so that a load or unload is answered once all gateways have followed,
and instances keep an unloaded adapter while a request has it.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.lora.request import LoRARequest

from gateway.admission import current_request
from gateway.settings import GatewaySettings
from shared.domain.adapters import AdapterSet
from shared.errors import PolyphaseError
from shared.runtime.logs import get_log
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.messages import AdaptersRequest, LoadRequest, UnloadRequest

log = get_log(__name__)
LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PATHS = frozenset({LOAD_PATH, UNLOAD_PATH})
START_S = 5.0  # for the first answer, before the gateway serves
WAIT_S, SOON_S = 1.0, 0.25  # of a request for changes; soon: an unloaded adapter is in use
RETRY_S = 0.5
_KEPT = 4096  # adapters whose requests may not be jobs yet; the oldest are forgotten
_TYPES = {400: "InvalidUserInput", 404: "NotFoundError", 500: "InternalServerError"}  # vLLM's


class ServedAdapters:
    """Follows the adapters that the cluster has loaded and keeps vLLM's table of models. in_use: keys of loaded
    adapters that jobs of this gateway have. models: vLLM's `OpenAIServingModels`.
    """

    def __init__(
        self, settings: GatewaySettings, schedulers: SchedulerClient, models: Any, in_use: Callable[[], set[str]]
    ) -> None:
        self._settings = settings
        self._schedulers = schedulers
        self._models = models
        self._in_use = in_use
        self._set = AdapterSet()
        self._keys: dict[int, str] = {}  # by the number of vLLM's LoRARequest
        self._first = asyncio.Event()
        self._trouble = ""

    @property
    def unknown(self) -> str:
        """Why it is not known which adapters are loaded; empty: it is."""
        return "" if self._first.is_set() else f"the loaded adapters are not known: {self._trouble or 'no answer yet'}"

    def key_of(self, request: LoRARequest) -> str:
        """The adapter's key, as of the moment at which the request was accepted."""
        key: str = self._keys.get(request.lora_int_id, request.lora_name)
        return key

    async def wait(self) -> None:
        """Wait for the first answer, for `START_S` at most."""
        try:
            async with asyncio.timeout(START_S):
                await self._first.wait()
        except TimeoutError:
            log.warning(self.unknown)

    async def follow(self) -> None:
        """Until cancelled."""
        while True:
            in_use = self._in_use()
            wait_s = SOON_S if in_use - self._set.keys else WAIT_S
            request = AdaptersRequest(self._settings.gateway_id, self._set.revision, tuple(sorted(in_use)), wait_s)
            try:
                found = await self._schedulers.adapters(request)
                if self._set.revision == request.revision:  # else a load was answered meanwhile
                    self._serve(found)
            except PolyphaseError as error:
                if error.message != self._trouble:
                    log.warning("loaded adapters are not followed; trying again", reason=error.message)
                self._trouble = error.message
                await asyncio.sleep(RETRY_S)
            else:
                self._trouble = ""
                self._first.set()

    async def load(self, request: LoadLoRAAdapterRequest, who: str) -> ErrorResponse | str:
        """As `OpenAIServingModels.load_lora_adapter`, for the whole cluster."""
        if (error := await self._models._check_load_lora_adapter_request(request)) is not None:
            found: ErrorResponse = error
            return found
        name = request.lora_name
        if request.is_3d_lora_weight:
            return _refusal(400, f"adapter {name}: is_3d_lora_weight cannot be served: leave it out")
        try:
            self._renew(await self._schedulers.load(LoadRequest(name, request.lora_path, request.load_inplace, who)))
        except PolyphaseError as failure:
            log.warning("an adapter was not loaded", name=name, who=who, reason=failure.message)
            return _refusal(failure.http_status, failure.message)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, request: UnloadLoRAAdapterRequest, who: str) -> ErrorResponse | str:
        """As `OpenAIServingModels.unload_lora_adapter`, for the whole cluster."""
        if (error := await self._models._check_unload_lora_adapter_request(request)) is not None:
            found: ErrorResponse = error
            return found
        try:
            self._renew(await self._schedulers.unload(UnloadRequest(request.lora_name, who)))
        except PolyphaseError as failure:
            log.warning("an adapter was not unloaded", name=request.lora_name, who=who, reason=failure.message)
            return _refusal(failure.http_status, failure.message)
        return f"Success: LoRA adapter '{request.lora_name}' removed successfully."

    def _renew(self, found: AdapterSet) -> None:
        """Serve that set, unless a newer one is served."""
        if found.revision > self._set.revision:
            self._serve(found)

    def _serve(self, found: AdapterSet) -> None:
        if found.revision == self._set.revision:
            return
        self._set, models = found, self._models
        served: dict[str, LoRARequest] = models.lora_requests
        wanted = {name: request for name, request in served.items() if name in self._settings.lora.adapters}
        for each in found.adapters:
            if each.name in wanted or models.is_base_model(each.name):
                log.error("a loaded adapter has the name of another model here; it is not served", name=each.name)
                continue
            known = served.get(each.name)
            if known is None or (self.key_of(known), known.lora_path) != (each.key, each.path):
                known = LoRARequest(each.name, models.lora_id_counter.inc(1), each.path)
                self._keys[known.lora_int_id] = each.key
            wanted[each.name] = known
        while len(self._keys) > _KEPT:
            del self._keys[next(iter(self._keys))]
        models.lora_requests = wanted
        log.info("serving adapters", revision=found.revision, adapters=sorted(wanted))


def routes(adapters: ServedAdapters) -> APIRouter:
    """vLLM's routes, which it mounts for the engine of its own process only."""
    router = APIRouter(dependencies=[Depends(validate_json_request)])

    @router.post(LOAD_PATH)
    async def load_lora_adapter(request: LoadLoRAAdapterRequest) -> Response:
        return _answer(await adapters.load(request, current_request.get().caller))

    @router.post(UNLOAD_PATH)
    async def unload_lora_adapter(request: UnloadLoRAAdapterRequest) -> Response:
        return _answer(await adapters.unload(request, current_request.get().caller))

    return router


def _answer(found: ErrorResponse | str) -> Response:
    if isinstance(found, ErrorResponse):
        return JSONResponse(found.model_dump(), status_code=found.error.code)
    return Response(found)


def _refusal(status: int, message: str) -> ErrorResponse:
    """In vLLM's shape. Its own function would replace the path, which the operator has sent, by a placeholder."""
    return ErrorResponse(
        error=ErrorInfo(message=message, type=_TYPES.get(status, HTTPStatus(status).phrase), code=status)
    )
