"""Which blocks of the cache are free, and who holds the others. A block that several sequences read is held once by each."""

import heapq


class Blocks:
    def __init__(self, total: int):
        self.total = total
        self._free = list(range(total))  # a heap: the lowest come first, so that memory in use stays together
        self._holders = [0] * total

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        block = heapq.heappop(self._free)
        self._holders[block] = 1
        return block

    def share(self, block: int) -> int:
        assert self._holders[block] > 0
        self._holders[block] += 1
        return block

    def give_back(self, block: int) -> None:
        assert self._holders[block] > 0
        self._holders[block] -= 1
        if not self._holders[block]:
            heapq.heappush(self._free, block)

    def exchange(self, block: int, free: int) -> None:
        """The holder of a block gets a free one in its place."""
        self._free.remove(free)
        heapq.heapify(self._free)
        self._holders[free] = self._holders[block]
        self._holders[block] = 0
        heapq.heappush(self._free, block)
