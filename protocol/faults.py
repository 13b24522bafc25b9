"""The faults that one broker of a local cluster is to have: data and pure functions, of the launcher and the broker.

The launcher writes them into a file of each broker (`minibroker fault`), and a broker that was started with `--faults
FILE` obeys it. Both know only this module.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

FILE_SUFFIX = ".json"
_OBEYED_SUFFIX = ".obeyed.json"
MAX_DELAY_MS = 600_000


class DiskFaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The faults of one log directory."""

    is_full: bool = False
    """No file can grow."""
    is_broken: bool = False
    """Every call fails with EIO."""
    sync_delay_ms: int = 0
    """Each fsync takes this much longer."""
    write_delay_ms: int = 0
    """Each write takes this much longer."""


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    revision: int = 0
    """Increases with each change."""
    disks: dict[str, DiskFaults] = {}
    """By the path of the log directory."""


class Obeyed(msgspec.Struct, frozen=True):
    """What a broker says about its faults."""

    revision: int
    """The revision that it obeys."""


def obeyed_path(path: str) -> str:
    """Return the path of the file with `Obeyed`, beside the one with `Faults`."""
    return path.removesuffix(FILE_SUFFIX) + _OBEYED_SUFFIX


def encoded(faults: Faults | Obeyed) -> bytes:
    return msgspec.json.format(msgspec.json.encode(faults), indent=2) + b"\n"


def decoded(data: bytes) -> Faults:
    """Raises ValueError with the rule."""
    faults = msgspec.json.decode(data, type=Faults)
    for path, disk in faults.disks.items():
        for name, delay_ms in (("sync_delay_ms", disk.sync_delay_ms), ("write_delay_ms", disk.write_delay_ms)):
            if not 0 <= delay_ms <= MAX_DELAY_MS:
                raise ValueError(f"{name} of {path} is {delay_ms}: give milliseconds from 0 to {MAX_DELAY_MS}")
    return faults


def disks_filled(faults: Faults, directories: Iterable[str]) -> Faults:
    return _with_disks(
        faults, {path: msgspec.structs.replace(_disk(faults, path), is_full=True) for path in directories}
    )


def disks_broken(faults: Faults, directories: Iterable[str]) -> Faults:
    return _with_disks(
        faults, {path: msgspec.structs.replace(_disk(faults, path), is_broken=True) for path in directories}
    )


def disks_slowed(faults: Faults, directories: Iterable[str], sync_delay_ms: int, write_delay_ms: int) -> Faults:
    """Set the delays of these log directories. Zeros end them."""
    return _with_disks(
        faults,
        {
            path: msgspec.structs.replace(
                _disk(faults, path), sync_delay_ms=sync_delay_ms, write_delay_ms=write_delay_ms
            )
            for path in directories
        },
    )


def disks_mended(faults: Faults) -> Faults:
    return msgspec.structs.replace(faults, disks={})


def healed(faults: Faults) -> Faults:
    """Return the end of all faults."""
    return Faults(revision=faults.revision)


def has_any(faults: Faults) -> bool:
    return faults != healed(faults)


def has_failed_disk(faults: Faults) -> bool:
    return any(disk.is_full or disk.is_broken for disk in faults.disks.values())


def described(faults: Faults) -> list[str]:
    """Return each fault in words, for `minibroker status`."""
    found = []
    for path, disk in sorted(faults.disks.items()):
        if disk.is_full:
            found.append(f"the disk of {path} is full")
        if disk.is_broken:
            found.append(f"the disk of {path} is broken")
        if disk.sync_delay_ms:
            found.append(f"each fsync in {path} takes {disk.sync_delay_ms} ms longer")
        if disk.write_delay_ms:
            found.append(f"each write in {path} takes {disk.write_delay_ms} ms longer")
    return found


def _disk(faults: Faults, path: str) -> DiskFaults:
    return faults.disks.get(path, DiskFaults())


def _with_disks(faults: Faults, changed: dict[str, DiskFaults]) -> Faults:
    disks = {path: disk for path, disk in {**faults.disks, **changed}.items() if disk != DiskFaults()}
    return msgspec.structs.replace(faults, disks=disks)
