"""The latest offset of each key, in bounded memory (Kafka's SkimpyOffsetMap).

Short keys are kept as they are, long ones as a digest. Two keys with one digest would cost the earlier of them its
latest record. With 128 bits that is practically impossible by chance, and the salt, drawn for each map, makes it
impossible by choice of keys (Kafka's digest is a plain MD5, for which equal pairs are easily made).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

_LONGEST_KEPT = 32
_DIGEST_BYTES = 16
ENTRY_BYTES = 200
"""A key of that length, an offset, and their share of the dictionary, also while that grows."""


class KeyMap:
    def __init__(self, buffer_bytes: int, salt: bytes) -> None:
        self._capacity = max(1, buffer_bytes // ENTRY_BYTES)
        self._salt = salt
        self._latest: dict[bytes | int | None, int] = {}

    def __len__(self) -> int:
        return len(self._latest)

    def has_room_for(self, count: int) -> bool:
        """Whether so many more keys fit, even if all of them are new. The first ones always do, lest a large batch keep
        its log from ever being cleaned."""
        return not self._latest or len(self._latest) + count <= self._capacity

    def put(self, keys: Sequence[bytes | None], offsets: Sequence[int]) -> None:
        """Add keys with their offsets, which must ascend over all calls. Records without a key are skipped."""
        self._latest.update(zip(self._short(keys), offsets, strict=True))
        self._latest.pop(None, None)

    def latest(self, keys: Sequence[bytes | None]) -> list[int]:
        """For each key the last offset that was put for it, or -1."""
        return [self._latest.get(key, -1) for key in self._short(keys)]

    def _short(self, keys: Sequence[bytes | None]) -> Sequence[bytes | int | None]:
        if all(key is None or len(key) <= _LONGEST_KEPT for key in keys):
            return keys
        return [key if key is None or len(key) <= _LONGEST_KEPT else self._digest(key) for key in keys]

    def _digest(self, key: bytes) -> int:
        """A number, which is equal to no short key."""
        return int.from_bytes(blake2b(key, digest_size=_DIGEST_BYTES, key=self._salt).digest(), "big")
