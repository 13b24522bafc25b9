"""Hints for `with` in place of `async with`, and vice versa: Python's own TypeError names neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar


class Asynchronous:
    """A class for `async with`. `with` raises a TypeError that names the blocking class."""

    _blocking: ClassVar[str] = ""
    """Its counterpart; empty: the class of the same name in minibroker.sync."""

    if not TYPE_CHECKING:  # type checkers find the mistake by themselves

        def __enter__(self) -> None:
            blocking = self._blocking or f"{_name_of(self)} of minibroker.sync"
            raise TypeError(
                f"{type(self).__name__} is asynchronous: write `async with`, or, without asyncio, use {blocking}"
            )

        def __exit__(self, *_: object) -> None:
            """Never called; `with` looks for it before it calls `__enter__`."""


class Blocking:
    """A class for `with`. `async with` raises a TypeError that names the asynchronous class."""

    _asynchronous: ClassVar[str] = ""
    """Its counterpart; empty: the class of the same name in minibroker."""

    if not TYPE_CHECKING:

        async def __aenter__(self) -> None:
            asynchronous = self._asynchronous or f"{_name_of(self)} of minibroker"
            raise TypeError(f"{type(self).__name__} is blocking: write `with`, or, in asyncio, use {asynchronous}")

        async def __aexit__(self, *_: object) -> None:
            """Never called; `async with` looks for it before it calls `__aenter__`."""


def _name_of(client: object) -> str:
    """Return the name of minibroker's class, of which the user's class may be derived."""
    return next(kind.__name__ for kind in type(client).__mro__ if kind.__module__.startswith("minibroker."))
