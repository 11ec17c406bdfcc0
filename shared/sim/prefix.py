"""Which prompt prefixes an engine still holds."""

from collections import OrderedDict


class PrefixCache:
    """Ids of prompt blocks, the least recently used forgotten first.

    Cached blocks live in memory that nobody holds, so the room changes with the load: `room_blocks` is handed in.
    An approximation: a running request's hold on shared blocks is counted in full, once for each request.
    """

    def __init__(self, blocks_of_id: int) -> None:
        self._blocks_of_id = max(1, blocks_of_id)
        self._ids: OrderedDict[int, None] = OrderedDict()

    def matched(self, prefix: tuple[int, ...], room_blocks: int) -> int:
        """How many ids from the start of `prefix` are held."""
        self._trim(room_blocks)
        count = 0
        for at in prefix:
            if at not in self._ids:
                break
            self._ids.move_to_end(at)
            count += 1
        return count

    def keep(self, prefix: tuple[int, ...], room_blocks: int) -> None:
        """Hold these from now on."""
        for at in prefix:
            self._ids[at] = None
            self._ids.move_to_end(at)
        self._trim(room_blocks)

    def _trim(self, room_blocks: int) -> None:
        most = room_blocks // self._blocks_of_id
        while len(self._ids) > most:
            self._ids.popitem(last=False)
