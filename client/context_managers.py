"""Hints for `with` in place of `async with`, and vice versa: Python's own TypeError names neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar


class Asynchronous:
    """A class for `async with`. `with` raises a TypeError that names the blocking class."""

    _blocking: ClassVar[str] = "Producer, Consumer or Admin of minibroker.sync"

    if not TYPE_CHECKING:  # type checkers find the mistake by themselves

        def __enter__(self) -> None:
            raise TypeError(
                f"{type(self).__name__} is asynchronous: write `async with`, or, without asyncio, use {self._blocking}"
            )

        def __exit__(self, *_: object) -> None:
            """Never called; `with` looks for it before it calls `__enter__`."""


class Blocking:
    """A class for `with`. `async with` raises a TypeError that names the asynchronous class."""

    _asynchronous: ClassVar[str] = "Producer, Consumer or Admin of minibroker"

    if not TYPE_CHECKING:

        async def __aenter__(self) -> None:
            raise TypeError(
                f"{type(self).__name__} is blocking: write `with`, or, in asyncio, use {self._asynchronous}"
            )

        async def __aexit__(self, *_: object) -> None:
            """Never called; `async with` looks for it before it calls `__aenter__`."""
