"""Reference-counted allocation of cache blocks. A block that several sequences share counts once for each."""

import heapq


class BlockAllocator:
    def __init__(self, total: int):
        self.total = total
        self._free = list(range(total))  # a heap: lowest first, which keeps the memory in use together
        self._counts = [0] * total

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        block = heapq.heappop(self._free)
        self._counts[block] = 1
        return block

    def share(self, block: int) -> int:
        assert self._counts[block] > 0
        self._counts[block] += 1
        return block

    def release(self, block: int) -> None:
        assert self._counts[block] > 0
        self._counts[block] -= 1
        if not self._counts[block]:
            heapq.heappush(self._free, block)

    def swap(self, block: int, free: int) -> None:
        """Replace an allocated block by a given free one."""
        self._free.remove(free)
        heapq.heapify(self._free)
        self._counts[free] = self._counts[block]
        self._counts[block] = 0
        heapq.heappush(self._free, block)
