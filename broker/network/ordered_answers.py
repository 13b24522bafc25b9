"""Keeps answers in the order of their requests, although they may become ready in another order. Pure."""

from __future__ import annotations

from typing import Generic, TypeVar

Answer = TypeVar("Answer")

MOST_HELD_BYTES = 1024 * 1024
"""Beyond this, no further request is dispatched until answers have left."""


class OrderedAnswers(Generic[Answer]):
    """The answers of one connection. Each request takes a place when it is dispatched. `answered` returns the answers
    that may leave."""

    def __init__(self) -> None:
        self._next_place = 0
        self._next_answer = 0
        self._held: dict[int, tuple[Answer, int]] = {}
        self.held_bytes = 0
        """Bytes of the answers that wait for earlier ones."""

    def take_place(self) -> int:
        self._next_place += 1
        return self._next_place - 1

    @property
    def open(self) -> int:
        """The number of places whose answers have not left."""
        return self._next_place - self._next_answer

    def has_room(self, most_open: int) -> bool:
        """Return whether another request may take a place."""
        return self.open < most_open and self.held_bytes < MOST_HELD_BYTES

    def answered(self, place: int, answer: Answer, size: int) -> list[Answer]:
        """Return the answers that may leave now that this one is ready, in order."""
        self._held[place] = (answer, size)
        self.held_bytes += size
        leaving = []
        while self._next_answer in self._held:
            answer, size = self._held.pop(self._next_answer)
            self._next_answer += 1
            self.held_bytes -= size
            leaving.append(answer)
        return leaving
