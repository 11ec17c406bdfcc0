"""The LoRA adapters of an instance: those of the cluster file, and those that the monitor has it load at run time."""

import asyncio
from pathlib import Path

from services.worker.engines.base import Engine
from shared.domain.adapters import is_version, version_key
from shared.errors import Busy, Conflict, EngineFailed, InvalidRequest, NotFound
from shared.model.adapters import LoraSection, digest_of, require_files
from shared.runtime.logs import get_log
from shared.wire.messages import LoadAdapterReply, LoadAdapterRequest, UnloadAdapterRequest

log = get_log(__name__)


class Adapters:
    """`served` maps the key of each adapter that requests may have to its digest; it is replaced, not changed."""

    def __init__(self, section: LoraSection, engine: Engine, of_file: dict[str, str]) -> None:
        self._section = section
        self._engine = engine
        self._changing = asyncio.Lock()
        self.served = dict(of_file)

    async def load(self, request: LoadAdapterRequest) -> LoadAdapterReply:
        """Load an adapter and serve it, also when the caller is gone meanwhile.

        Raises NotFound for a folder without an adapter, Conflict for files with another digest than requested, Busy
        where adapters that requests still have take the room, EngineFailed with vLLM's reason for another adapter.
        """
        if not self._section.allow_runtime_updating:
            raise InvalidRequest(f"adapter {request.name}: this instance loads no adapters while it serves")
        return await asyncio.shield(self._load(request))

    async def unload(self, request: UnloadAdapterRequest) -> None:
        """Serve the adapter no more. The engine keeps it while requests have it."""
        if not is_version(request.key):
            raise InvalidRequest(f"adapter {request.key} is in the cluster file: it is loaded for good")
        async with self._changing:
            if request.key in self.served:
                self.served = {key: digest for key, digest in self.served.items() if key != request.key}
                await self._engine.remove_adapter(request.key)
                log.info("adapter unloaded", key=request.key)

    async def _load(self, request: LoadAdapterRequest) -> LoadAdapterReply:
        async with self._changing:
            digest = await self._digest_of(request)
            if request.digest and digest != request.digest:
                raise Conflict(
                    f"adapter {request.name}: the files in {request.path} are others than those that were loaded: load "
                    "it again, in place"
                )
            key = version_key(request.name, digest)
            if key in self.served:
                return LoadAdapterReply(digest)
            if len(self.served) >= self._section.room:
                raise Busy(
                    f"adapter {request.name}: {len(self.served)} adapters are loaded, also former ones that requests "
                    f"may still have, and `lora.max_adapters` allows {self._section.room}"
                )
            try:
                await self._engine.add_adapter(key, request.path)
            except EngineFailed as error:
                raise EngineFailed(f"adapter {request.name}: {error.message}") from error
            try:
                if await self._digest_of(request) != digest:
                    raise Conflict(f"adapter {request.name}: the files in {request.path} changed while they were read")
            except BaseException:
                await self._engine.remove_adapter(key)
                raise
            self.served = {**self.served, key: digest}
            log.info("adapter loaded", key=key, path=request.path)
            return LoadAdapterReply(digest)

    async def _digest_of(self, request: LoadAdapterRequest) -> str:
        name, folder = request.name, Path(request.path)
        try:
            await asyncio.to_thread(require_files, name, folder)
            return await asyncio.to_thread(digest_of, name, folder)
        except (InvalidRequest, OSError) as error:  # the beginning is vLLM's sentence
            cause = str(error).removeprefix(f"adapter {name}: ")
            raise NotFound(f"Loading lora {name} failed: No adapter found for {request.path}: {cause}") from error
