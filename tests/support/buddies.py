"""A textbook buddy allocator: lists of free blocks that split and merge."""

from bisect import insort


class Buddies:
    """Allocates the smallest free block that fits, at the lowest address.

    The pool is the binary expansion of its size, in blocks of at most `largest`.
    """

    def __init__(self, num_leaves: int, largest: int) -> None:
        self.top = largest.bit_length() - 1
        self.free: list[list[int]] = [[] for _ in range(self.top + 1)]
        self.orders: dict[int, int] = {}
        self.roots: dict[int, int] = {}
        start = 0
        order = self.top
        while start < num_leaves:
            while start + (1 << order) > num_leaves:
                order -= 1
            self.free[order].append(start)
            self.roots[start] = order
            start += 1 << order

    def allocate(self, order: int) -> int | None:
        """Allocates a block; returns its first leaf, or None if there is none."""
        for size in range(order, self.top + 1):
            if self.free[size]:
                start = self.free[size].pop(0)
                for half in reversed(range(order, size)):
                    insort(self.free[half], start + (1 << half))
                self.orders[start] = order
                return start
        return None

    def release(self, start: int) -> None:
        """Releases a block, and merges it with its buddy while that is free."""
        order = self.orders.pop(start)
        while self.roots.get(start) != order:
            buddy = start ^ (1 << order)
            if buddy not in self.free[order]:
                break
            self.free[order].remove(buddy)
            start = min(start, buddy)
            order = order + 1
        insort(self.free[order], start)
