"""Answers that must leave in the order of their requests, and come in another: each waits for its turn. Pure."""

from __future__ import annotations

from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class Turns(Generic[Answer]):
    """Of one connection. Each request takes a place when it is dispatched; `answered` returns what may leave then."""

    def __init__(self) -> None:
        self._next_place = 0
        self._next_answer = 0
        self._held: dict[int, tuple[Answer, int]] = {}
        self.held_bytes = 0
        """Of the answers that wait for others."""

    def take_place(self) -> int:
        self._next_place += 1
        return self._next_place - 1

    @property
    def open(self) -> int:
        """Places whose answers have not left."""
        return self._next_place - self._next_answer

    def answered(self, place: int, answer: Answer, size: int) -> list[Answer]:
        """The answers whose turn has come with this one, in order."""
        self._held[place] = (answer, size)
        self.held_bytes += size
        leaving = []
        while self._next_answer in self._held:
            answer, size = self._held.pop(self._next_answer)
            self._next_answer += 1
            self.held_bytes -= size
            leaving.append(answer)
        return leaving
