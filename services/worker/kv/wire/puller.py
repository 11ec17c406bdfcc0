"""The importer's thread of one rank: pulls KV from exporters and writes it where the engine wants it."""

import logging
import threading
from collections import deque
from collections.abc import Callable

from services.worker.kv.errors import KvError, KvFault
from services.worker.kv.wire.importing import ImportShape, Load, PullLimits, PullResult
from services.worker.kv.wire.imports import TURN_S, Imports
from services.worker.kv.wire.transport import Transport
from shared.domain.kv import KvHandle

_log = logging.getLogger(__name__)


class Puller:
    """Runs imports; commands come from other threads, results go to `on_end` on the puller's own.

    `on_end` is called exactly once a load, whatever happens; its destination is not touched again after that.
    """

    def __init__(
        self,
        transport: Transport,
        shape: ImportShape,
        on_end: Callable[[PullResult], None],
        limits: PullLimits | None = None,
        on_death: Callable[[str, BaseException], None] = lambda *_: None,
        enter: Callable[[], None] = lambda: None,
    ) -> None:
        """On the puller's thread `enter` is called first, and `on_death(thread, error)` when a bug ends it."""
        self._imports = Imports(transport, shape, on_end, limits or PullLimits())
        self.counters = self._imports.counters
        self._transport = transport
        self._rank = shape.rank
        self._on_death = on_death
        self._enter = enter
        self._commands: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._stopping = self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-puller", daemon=True)

    def start(self) -> None:
        """Pull in a thread of its own."""
        self._thread.start()

    def load(self, load: Load) -> None:
        """Begin, or let a prefetch go on into its blocks."""
        if not self._command(lambda: self._imports.load(load)):
            self._imports.reject(load, KvError(KvFault.STOPPED))

    def prefetch(self, handle: KvHandle, tokens: int, timeout_s: float) -> None:
        """Begin without blocks; silently not done where there is no room. Kept for `timeout_s`, if no load comes."""
        self._command(lambda: self._imports.prefetch(handle, tokens, timeout_s))

    def cancel(self, transfer_id: str, prefetch_only: bool = False) -> None:
        """End an import; a load's `on_end` follows promptly."""
        self._command(lambda: self._imports.cancel(transfer_id, prefetch_only))

    def confirm(self, handle: KvHandle) -> None:
        """Tell the exporters that this rank needs nothing of the handle."""
        self._command(lambda: self._imports.confirm(handle))

    def renew(self, handle: KvHandle) -> None:
        """Renew the lease of what is going to be pulled and is not yet."""
        self._command(lambda: self._imports.renew(handle))

    def stop(self) -> None:
        """End all imports, the thread and the links."""
        self._stopping = True
        self._transport.wake()
        self._thread.join()

    def _command(self, command: Callable[[], None]) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._commands.append(command)
        self._transport.wake()
        return True

    def _run(self) -> None:
        try:
            self._enter()
            while not self._stopping:
                for link in self._transport.wait(TURN_S):
                    self._imports.receive(link)
                self._obey()
                self._imports.check()
        except Exception as error:
            _log.exception("the KV puller of rank %d ended", self._rank)
            self._on_death("puller", error)
        finally:
            with self._lock:
                self._closed = True
            self._obey()
            self._imports.end_all(KvError(KvFault.STOPPED))
            self._transport.close()

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()()
