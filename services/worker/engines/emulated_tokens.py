"""The tokens of an emulated engine: the answers that it gives, and its prefix cache, which names blocks of tokens and
holds no KV.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from services.worker.engines.base import BlocksRemoved, BlocksStored, CacheSink, EngineRequest
from shared.domain.prompt import block_hashes, next_hash, packed, root_hash

_MAX_BLOCKS = 1 << 30  # of a prompt: no bound
_TOKENS = 997  # a prime, so that the tokens of two positions rarely agree
_FIRST = 300  # below it tokenizers keep their special tokens and single bytes


def token_at(position: int) -> int:
    """The token at a position of the sequence: the same on every instance, so that an answer goes on alike after a
    hand-over.
    """
    return _FIRST + position * 7919 % _TOKENS


def output_token(request: EngineRequest, position: int) -> int:
    """The token at a position after the prompt: a forced token of the request, or else `token_at`."""
    output_position = position - len(request.prompt_token_ids)
    if output_position < len(request.forced_tokens):
        return request.forced_tokens[output_position]
    return token_at(position)


class _Sampling(msgspec.Struct):
    """The sampling parameters that matter here, by vLLM's names: when an answer ends, beside max_tokens, and log
    probabilities, which an engine without a model does not have.
    """

    stop_token_ids: list[int] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None


_SAMPLING = msgspec.msgpack.Decoder(_Sampling)
_LOGPROBS = ("logprobs", "prompt_logprobs", "logprob_token_ids")


def refusal(request: EngineRequest) -> str:
    """Why an emulated engine cannot compute this request; empty where it can."""
    sampling = _sampling(request)
    requested = [f"{name} {value}" for name in _LOGPROBS if (value := getattr(sampling, name)) is not None]
    if not requested:
        return ""
    return f"{', '.join(requested)}: an emulated engine has no model and no log probabilities: leave them out"


def answer_tokens(request: EngineRequest) -> tuple[int, str]:
    """How many tokens the answer has, and why it ends then. An emulated token follows from its position, so both are
    known before. A stop token ends an answer, as with a real engine, so that clients can allow more tokens than they
    get.
    """
    prompt, limit, stops = len(request.prompt_token_ids), request.max_tokens, set(_sampling(request).stop_token_ids)
    for at in range(len(request.forced_tokens), limit if stops else 0):
        if token_at(prompt + at) in stops:
            return at + 1, "stop"
    return limit, "length"


def _sampling(request: EngineRequest) -> _Sampling:
    """Undecodable sampling parameters count as the defaults."""
    try:
        return _SAMPLING.decode(request.generation.sampling)
    except msgspec.MsgspecError:
        return _Sampling()


class EmulatedCache:
    """Whole blocks of computed tokens. Blocks that no request uses lie in free memory and are dropped as it is taken:
    the least recently used first, of one request the last first.

    Blocks that requests share are counted once for each of them, so memory is a little tighter than in vLLM.
    """

    def __init__(self, block_size: int, sink: CacheSink) -> None:
        self.block_size = block_size
        self._sink = sink
        self._users: dict[int, int] = {}  # of each block that is held
        self._unused: OrderedDict[int, None] = OrderedDict()  # the first goes first

    def __contains__(self, name: int) -> bool:
        return name in self._users

    def use(self, names: Sequence[int]) -> None:
        for name in names:
            self._users[name] += 1
            self._unused.pop(name, None)

    def store(self, name: int, parent: int | None, token_ids: Sequence[int], salt: str) -> None:
        """A request has computed a block, or the last token of it."""
        if name not in self._users:
            self._users[name] = 0
            self._sink([BlocksStored([name], parent, token_ids, salt)])

    def leave(self, names: Sequence[int]) -> None:
        for name in reversed(names):
            self._users[name] -= 1
            if not self._users[name]:
                self._unused[name] = None

    def shrink(self, free_blocks: int) -> None:
        """Drop unused blocks beyond the free ones."""
        gone = []
        while len(self._unused) > free_blocks:
            name, _ = self._unused.popitem(last=False)
            del self._users[name]
            gone.append(name)
        if gone:
            self._sink([BlocksRemoved(gone)])


class CachedPrefix:
    """One request's part in the cache. `token_at` gives the tokens after the prompt, by position."""

    def __init__(self, cache: EmulatedCache, prompt: Sequence[int], salt: str, token_at: Callable[[int], int]) -> None:
        self._cache = cache
        self._prompt = prompt
        self._salt = salt
        self._token_at = token_at
        self._used: list[int] = []

    def begin(self) -> int:
        """Use the blocks that are held of the prompt; their tokens. The last token is not among them: it is
        computed.
        """
        size = self._cache.block_size
        for name in block_hashes(self._prompt[:-1], self._salt, block_tokens=size, most=_MAX_BLOCKS):
            if name not in self._cache:
                break
            self._used.append(name)
        self._cache.use(self._used)
        return len(self._used) * size

    def computed(self, tokens: int) -> None:
        """The first `tokens` tokens have their KV: their whole blocks can be hit from now on."""
        size = self._cache.block_size
        while (len(self._used) + 1) * size <= tokens:
            at = len(self._used)
            block = self._tokens(at * size, (at + 1) * size)
            name = next_hash(self._used[-1] if at else root_hash(self._salt), packed(block))
            self._cache.store(name, self._used[-1] if at else None, block, self._salt)
            self._cache.use([name])
            self._used.append(name)

    def end(self) -> None:
        self._cache.leave(self._used)
        self._used = []

    def _tokens(self, start: int, stop: int) -> list[int]:
        prompt = self._prompt
        return [*prompt[start:stop], *(self._token_at(at) for at in range(max(start, len(prompt)), stop))]
