"""The latest offset of each key, in bounded memory (Kafka's SkimpyOffsetMap).

Keys may be of any size, so what is kept is a digest. Two keys with one digest would cost the earlier of them its latest
record. 128 bits make that a matter of luck that nobody has, and the salt, drawn for each map, keeps those from helping
their luck who may choose the keys (Kafka's is a plain MD5, of which anybody can make two that are equal).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 16
ENTRY_BYTES = 200
"""A digest, an offset, and their share of the dictionary, which is between half and fully used."""


class KeyMap:
    def __init__(self, buffer_bytes: int, salt: bytes) -> None:
        self._capacity = max(1, buffer_bytes // ENTRY_BYTES)
        self._salt = salt
        self._latest: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._latest)

    def has_room_for(self, count: int) -> bool:
        """Whether so many more keys fit, even if all of them are new. The first ones always do, lest a large batch keep
        its log from ever being cleaned."""
        return not self._latest or len(self._latest) + count <= self._capacity

    def put(self, keys: Sequence[bytes | None], offsets: Sequence[int]) -> None:
        """Offsets must come in ascending order, over all calls. What has no key is passed over."""
        latest, digest = self._latest, self._digest
        for key, offset in zip(keys, offsets, strict=True):
            if key is not None:
                latest[digest(key)] = offset

    def latest(self, key: bytes) -> int:
        """The last offset that was put for the key, or -1."""
        return self._latest.get(self._digest(key), -1)

    def _digest(self, key: bytes) -> bytes:
        return blake2b(key, digest_size=_DIGEST_BYTES, key=self._salt).digest()
