"""The prefix cache of an emulated engine: as vLLM's, without KV."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from services.worker.engines.cache_events import BlocksRemoved, BlocksStored, CacheSink
from shared.domain.prompt import block_hashes, next_hash, packed, root_hash

_MOST = 1 << 30


class EmulatedCache:
    """Whole blocks of computed tokens. Those that no request uses live in the free ones, and go as these are taken:
    the least recently used first, of one request the last first.

    Blocks that requests share are counted once for each of them, so memory is a little tighter than in vLLM.
    """

    def __init__(self, block_size: int, sink: CacheSink) -> None:
        self.block_size = block_size
        self._sink = sink
        self._users: dict[int, int] = {}  # of each block that is held
        self._unused: OrderedDict[int, None] = OrderedDict()  # the first goes first

    def __contains__(self, name: int) -> bool:
        """Whether a block is held."""
        return name in self._users

    def use(self, names: Sequence[int]) -> None:
        """A request uses these, which are held."""
        for name in names:
            self._users[name] += 1
            self._unused.pop(name, None)

    def store(self, name: int, parent: int | None, token_ids: Sequence[int], salt: str) -> None:
        """A request has computed a block, or the last token of it."""
        if name not in self._users:
            self._users[name] = 0
            self._sink([BlocksStored([name], parent, token_ids, salt)])

    def leave(self, names: Sequence[int]) -> None:
        """A request uses these no more."""
        for name in reversed(names):
            self._users[name] -= 1
            if not self._users[name]:
                self._unused[name] = None

    def shrink(self, free_blocks: int) -> None:
        """So many blocks are free."""
        gone = []
        while len(self._unused) > free_blocks:
            name, _ = self._unused.popitem(last=False)
            del self._users[name]
            gone.append(name)
        if gone:
            self._sink([BlocksRemoved(gone)])


class CacheUse:
    """One request's part in the cache. `token_at` gives what follows the prompt, by position."""

    def __init__(self, cache: EmulatedCache, prompt: Sequence[int], salt: str, token_at: Callable[[int], int]) -> None:
        self._cache = cache
        self._prompt = prompt
        self._salt = salt
        self._token_at = token_at
        self._used: list[int] = []

    def begin(self) -> int:
        """Use what is held of the prompt; how many tokens that is. The last one is always computed."""
        size = self._cache.block_size
        for name in block_hashes(self._prompt[:-1], self._salt, block_tokens=size, most=_MOST):
            if name not in self._cache:
                break
            self._used.append(name)
        self._cache.use(self._used)
        return len(self._used) * size

    def computed(self, tokens: int) -> None:
        """So many tokens from the start have their KV: whole blocks of them can be hit from now on."""
        size = self._cache.block_size
        while (len(self._used) + 1) * size <= tokens:
            at = len(self._used)
            block = self._tokens(at * size, (at + 1) * size)
            name = next_hash(self._used[-1] if at else root_hash(self._salt), packed(block))
            self._cache.store(name, self._used[-1] if at else None, block, self._salt)
            self._cache.use([name])
            self._used.append(name)

    def end(self) -> None:
        """The request is over."""
        self._cache.leave(self._used)
        self._used = []

    def _tokens(self, start: int, stop: int) -> list[int]:
        prompt = self._prompt
        return [*prompt[start:stop], *(self._token_at(at) for at in range(max(start, len(prompt)), stop))]
