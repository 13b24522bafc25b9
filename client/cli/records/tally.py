"""The results of the lines or records that `produce` sent: acknowledged, failed, and why.

Checking every record would cost as much as sending it. The producer is therefore flushed now and then while more is
sent: if a flush finds no failure, all records before it are acknowledged. Only after a failure is each Delivery
awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from minibroker.client.cli.terminal.output import TIMED_OUT, explain
from minibroker.client.errors import DeliveryTimedOut
from minibroker.client.producer import Producer
from minibroker.client.producing.delivery import BatchDelivery, BatchDeliveryFailed, Delivery
from minibroker.client.tasks import Pulse
from minibroker.protocol.errors import MinibrokerError

_SETTLE_EVERY_S = 0.5
_MOST_UNSETTLED = 2_000_000
"""The deliveries of this many records take about 150 MB."""

_MOST_NAMED = 5


class Tally:
    """Counts lines (or records, as `noun` says), numbered from 1 in the order of `add`. The counts are final after
    `settle_rest`."""

    def __init__(self, noun: str = "line") -> None:
        self.noun = noun
        self.acknowledged = 0
        self.has_failed = False
        self._deliveries: list[Delivery | BatchDelivery] = []
        """Deliveries of the lines after those known to be acknowledged."""
        self._unsettled = 0
        """The number of these lines."""
        self._failed: dict[MinibrokerError, list[int]] = {}
        self._settled = Pulse()

    @property
    def lines(self) -> int:
        return self.acknowledged + self._unsettled + sum(map(len, self._failed.values()))

    def add(self, delivery: Delivery | BatchDelivery) -> None:
        """Add the next line or lines."""
        self._deliveries.append(delivery)
        self._unsettled += 1 if isinstance(delivery, Delivery) else len(delivery)

    def refuse(self, error: MinibrokerError) -> None:
        """Record that `send` rejected the next line, which is the last."""
        self._failed[error] = [self.lines + 1]
        self.has_failed = True

    async def has_room(self) -> None:
        """Wait while too many lines are neither acknowledged nor failed."""
        while self._unsettled > _MOST_UNSETTLED:
            await self._settled.wait()

    async def keep_settling(self, producer: Producer) -> None:
        """Settle now and then until the first failure."""
        while not self.has_failed:
            await asyncio.sleep(_SETTLE_EVERY_S)
            await self.settle(producer)

    async def settle(self, producer: Producer) -> None:
        """Wait until every line so far is acknowledged or failed, and record whether there was a failure."""
        count, lines = len(self._deliveries), self._unsettled
        try:
            if count:
                await producer.flush()
        except MinibrokerError:
            self.has_failed = True
        # A flush that succeeds proves nothing if a `drain` has already raised the failures.
        if not self.has_failed:
            self.acknowledged += lines
            self._unsettled -= lines
            del self._deliveries[:count]
            self._settled.notify()

    async def settle_rest(self) -> None:
        """Settle the remaining lines. Call this when the producer is closed: every Delivery has completed then, so this
        does not wait."""
        line, deliveries = self.acknowledged + 1, self._deliveries[:]
        self._deliveries.clear()
        self._unsettled = 0
        for delivery in deliveries:
            count = 1 if isinstance(delivery, Delivery) else len(delivery)
            try:
                await delivery
                self.acknowledged += count
            except BatchDeliveryFailed as error:
                self.acknowledged += count - len(error.indexes)
                for index, failure in zip(error.indexes, error.failures, strict=True):
                    self._failed.setdefault(failure.error, []).append(line + index)
            except MinibrokerError as error:
                self._failed.setdefault(error, []).append(line)
            line += count

    def __str__(self) -> str:
        """Such as `9 of 12 lines acknowledged, 3 not: line 2: REASON; lines 11 to 12: REASON`."""
        counts = f"{self.acknowledged} of {self.lines} {self.noun}s acknowledged"
        if not self._failed:
            return counts
        by_reason: dict[str, list[int]] = {}
        for error, lines in self._failed.items():
            by_reason.setdefault(str(error).rstrip("."), []).extend(lines)
        reasons = [f"{name_lines(lines, self.noun)}: {reason}" for reason, lines in by_reason.items()]
        if len(reasons) > _MOST_NAMED:
            reasons[_MOST_NAMED:] = [f"and {len(reasons) - _MOST_NAMED} other reasons"]
        return f"{counts}, {self.lines - self.acknowledged} not: {'; '.join(reasons)}"

    def failure(self, text: str) -> MinibrokerError:
        """Return an error with this text whose exit code fits the failed lines."""
        codes = {explain(error)[0] for error in self._failed}
        return DeliveryTimedOut(text) if codes == {TIMED_OUT} else MinibrokerError(text)


def name_lines(numbers: Iterable[int], noun: str = "line") -> str:
    """Such as `line 2`, or `lines 1 to 3, 5, 9, 12, 14 and 7 more`: the first few, and how many more there are."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    named = ", ".join(f"{first} to {last}" if last > first else f"{first}" for first, last in ranges[:_MOST_NAMED])
    rest = sum(last - first + 1 for first, last in ranges[_MOST_NAMED:])
    many = len(ranges) > 1 or ranges[0][0] != ranges[0][1]
    return f"{noun}{'s' * many} {named}{f' and {rest} more' if rest else ''}"
