"""What a consumer's user is doing, for the tasks that must know: whether records are in its hands, and when it last
asked for some.

The consumer notes that where it hands out a batch, not for each record. How far the user is within a batch that it
takes record by record shows in the iterator (`mark`), which can be read from another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import length_hint

from minibroker.client.fetching.records import Record
from minibroker.client.tasks import Pulse
from minibroker.protocol.world import Clock


class Activity:
    """Written in the consumer's event loop; `mark`, `asking` and `asked_at` are read by the heart's thread, too."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.records: Iterator[Record] = iter(())
        """The rest of the batch that is being taken record by record."""
        self.asking = 0
        """How many calls wait for records just now."""
        self.asked_at = clock.monotonic()
        """When a call for records last began or returned."""
        self.holds = False
        """The user has been handed records and has not asked for more since."""
        self.is_quiet = False
        """Nothing is to be handed out: partitions are about to be taken away, or were."""
        self.freed = Pulse()
        """Beats when `holds` becomes false."""
        self.on_ask: Callable[[], None] | None = None
        """Called when the user asks for records."""

    def mark(self) -> object:
        """Another value than before if records were taken since."""
        return self.asked_at, id(self.records), length_hint(self.records)

    def asks(self) -> None:
        """The user asks for records: those that it was handed are done with."""
        self.asking += 1
        self.asked_at = self._clock.monotonic()
        self.done()
        if self.on_ask is not None:
            self.on_ask()

    def done(self) -> None:
        """What the user was handed, it is done with."""
        if self.holds:
            self.holds = False
            self.freed.notify()

    def asked(self, is_given: bool) -> None:
        """The call returns, with records or without any."""
        self.asking -= 1
        self.asked_at = self._clock.monotonic()
        self.holds = is_given or self.holds
