"""Bounds what all clients together make the broker keep."""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)


class FairBudget(Generic[Owner]):
    """What the owners hold together stays within `limit`: beyond it, the owner that holds most gives way.

    So an owner that holds little loses nothing, whatever others do. Rejected: refusing the newcomer, who is rarely the
    one that fills the budget; a limit for each owner, which is too small for honest ones if the sum is to be bounded.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        """In total."""
        self.gave_way = 0
        """Number of things that were given up so far."""
        self._by_owner: dict[Owner, dict[object, tuple[int, Callable[[], object]]]] = {}
        self._held_by: dict[Owner, int] = {}

    def hold(self, owner: Owner, thing: object, size: int, give_way: Callable[[], object]) -> None:
        """Count a thing until it is released. `give_way` must release it; it may be called at once."""
        self._by_owner.setdefault(owner, {})[thing] = size, give_way
        self._held_by[owner] = self._held_by.get(owner, 0) + size
        self.held += size
        while self.held > self.limit:
            heaviest = max(self._held_by, key=lambda each: self._held_by[each])
            for one, (_, give_up) in list(self._by_owner[heaviest].items()):
                self.gave_way += 1
                give_up()
                self.release(heaviest, one)

    def release(self, owner: Owner, thing: object) -> None:
        """Stop counting the thing, if it is counted."""
        things = self._by_owner.get(owner)
        if things is None or thing not in things:
            return
        size, _ = things.pop(thing)
        self.held -= size
        if things:
            self._held_by[owner] -= size
        else:
            del self._by_owner[owner], self._held_by[owner]


class Turns:
    """Lets memory be used in turns: in the order in which it was asked for, `limit` bytes in all at a time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._left = limit
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def take(self, size: int) -> int:
        """Wait for room, and return the bytes taken, which must be given back. More than the limit counts as the limit:
        then nothing else has a turn."""
        size = min(size, self.limit)
        if not self._waiting and size <= self._left:
            self._left -= size
            return size
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, size))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._admit()  # those behind it
            else:
                self.give_back(size)
            raise
        return size

    def give_back(self, size: int) -> None:
        self._left += size
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            turn, size = self._waiting[0]
            if not turn.done():
                if size > self._left:
                    break
                self._left -= size
                turn.set_result(None)
            self._waiting.popleft()
