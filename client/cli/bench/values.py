"""The values that benchmarks send, and the check after reading: values contain their number and do not compress.

A value begins with its run (a random number of 32 bits) and its number within the run, followed by noise derived from
both, so any process that reads it knows every byte it must have. A random seed for the noise of each run would have to
be passed on; a checksum inside the value would take some of its bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import NamedTuple

HEADER_BYTES = 8
_NUMBER_BITS = 32
_NOISE_BYTES = 16 * 1024 * 1024
"""More than a batch holds, so that nothing repeats within a batch."""


class Values:
    """Makes and recognises values. The size of a value is at least HEADER_BYTES, and its number below 2**32."""

    def __init__(self) -> None:
        self._noise = Random(0).randbytes(_NOISE_BYTES)

    def make(self, run: int, number: int, size: int) -> bytes:
        header = (run << _NUMBER_BITS | number).to_bytes(HEADER_BYTES, "big")
        return header + self._noise_of(run + number, size - HEADER_BYTES)

    def recognise(self, value: bytes | None) -> tuple[int, int] | None:
        """Return run and number of a value if it is exactly the result of `make` for them; None for any other value."""
        if value is None or len(value) < HEADER_BYTES:
            return None
        run, number = divmod(int.from_bytes(value[:HEADER_BYTES], "big"), 1 << _NUMBER_BITS)
        if value[HEADER_BYTES:] != self._noise_of(run + number, len(value) - HEADER_BYTES):
            return None
        return run, number

    def _noise_of(self, index: int, length: int) -> bytes:
        places = (_NOISE_BYTES - length) // max(length, 1)
        at = index % places * length
        return self._noise[at : at + length]


class ContentVerdict(NamedTuple):
    checked: int
    """Records equal to the ones that were sent, byte for byte. 0 if no record comes from a benchmark."""
    missing: int
    """Missing numbers below the highest of their run."""
    duplicated: int
    out_of_order: int
    """Records behind a higher number of their run in the same partition."""
    altered: int
    """Records that are not a benchmark's values, if others are."""

    @property
    def problem(self) -> str | None:
        """The problems found, if any."""
        counts = [
            f"{count} {name.replace('_', ' ')}" for name, count in self._asdict().items() if count and name != "checked"
        ]
        return ", ".join(counts) or None


class ContentCheck:
    """Takes a topic's values, partition by partition in offset order, and reports problems.

    Costs a few hundred nanoseconds and about a hundred bytes per record: too much for a timed loop.
    """

    def __init__(self) -> None:
        self._values = Values()
        self._seen: set[tuple[int, int]] = set()
        self._highest: dict[int, int] = {}
        """The highest number of each run."""
        self._highest_in: dict[tuple[int, int], int] = {}
        """The highest number of each run in each partition."""
        self._duplicated = self._out_of_order = self._unknown = 0

    def add(self, partition: int, values: Iterable[bytes | None]) -> None:
        for value in values:
            found = self._values.recognise(value)
            if found is None:
                self._unknown += 1
                continue
            if found in self._seen:
                self._duplicated += 1
                continue
            self._seen.add(found)
            run, number = found
            before = self._highest_in.get((partition, run), -1)
            if number < before:
                self._out_of_order += 1
            else:
                self._highest_in[partition, run] = number
                if number > self._highest.get(run, -1):
                    self._highest[run] = number

    def verdict(self) -> ContentVerdict:
        return ContentVerdict(
            checked=len(self._seen),
            missing=sum(highest + 1 for highest in self._highest.values()) - len(self._seen),
            duplicated=self._duplicated,
            out_of_order=self._out_of_order,
            altered=self._unknown if self._seen else 0,
        )
