"""The faults that one broker of a local cluster is to have: data and pure functions, of the launcher and the broker.

The launcher writes them into a file of each broker (`minibroker fault`), and a broker that was started with `--faults
FILE` obeys it. Both know only this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

FILE_SUFFIX = ".json"
_OBEYED_SUFFIX = ".obeyed.json"
MAX_DELAY_MS = 600_000
MAX_CLOCK_OFFSET_MS = 10 * 365 * 86_400_000


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


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The faults between this broker and another one."""

    loses_sent: bool = False
    """What this broker sends does not arrive."""
    loses_received: bool = False
    """What the other broker sends does not arrive."""
    delay_ms: int = 0
    """Each packet in either direction takes this much longer."""


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    revision: int = 0
    """Increases with each change."""
    disks: dict[str, DiskFaults] = {}
    """By the path of the log directory."""
    links: dict[int, Link] = {}
    """By the id of the other broker, which has the counterpart."""
    zookeeper_is_cut: bool = False
    is_isolated: bool = False
    """No packet arrives or leaves."""
    delay_ms: int = 0
    """Each packet that it sends takes this much longer."""
    drops: int = 0
    """How many times all its connections were to be dropped so far."""
    clock_offset_ms: int = 0
    """Added to its wall clock, and to no other clock."""


class Obeyed(msgspec.Struct, frozen=True):
    """What a broker says about its faults."""

    revision: int
    """The revision that it obeys."""
    ports: tuple[int, ...] = ()
    """The ports on which it listens."""


def obeyed_path(path: str) -> str:
    """Return the path of the file with `Obeyed`, beside the one with `Faults`."""
    return path.removesuffix(FILE_SUFFIX) + _OBEYED_SUFFIX


def broker_of(name: str) -> int | None:
    """Return the broker whose `Obeyed` a file with this name has; None if it is another file."""
    number = name.removeprefix("broker-").removesuffix(_OBEYED_SUFFIX)
    return int(number) if number.isdecimal() and name == f"broker-{number}{_OBEYED_SUFFIX}" else None


def encoded(faults: Faults | Obeyed) -> bytes:
    return msgspec.json.format(msgspec.json.encode(faults), indent=2) + b"\n"


def decoded(data: bytes) -> Faults:
    """Raises ValueError with the rule."""
    faults = msgspec.json.decode(data, type=Faults)
    delays = {"delay_ms": faults.delay_ms}
    delays |= {f"delay_ms of link {peer}": link.delay_ms for peer, link in faults.links.items()}
    for path, disk in faults.disks.items():
        delays |= {f"sync_delay_ms of {path}": disk.sync_delay_ms, f"write_delay_ms of {path}": disk.write_delay_ms}
    for name, delay_ms in delays.items():
        if not 0 <= delay_ms <= MAX_DELAY_MS:
            raise ValueError(f"{name} is {delay_ms}: give milliseconds from 0 to {MAX_DELAY_MS}")
    if abs(faults.clock_offset_ms) > MAX_CLOCK_OFFSET_MS:
        raise ValueError(f"clock_offset_ms is {faults.clock_offset_ms}: give at most {MAX_CLOCK_OFFSET_MS}, as + or -")
    return faults


def disks_filled(faults: Faults, directories: Iterable[str]) -> Faults:
    return _with_disks(
        faults, {path: msgspec.structs.replace(_disk(faults, path), is_full=True) for path in directories}
    )


def disks_broken(faults: Faults, directories: Iterable[str]) -> Faults:
    return _with_disks(
        faults, {path: msgspec.structs.replace(_disk(faults, path), is_broken=True) for path in directories}
    )


def disks_slowed(faults: Faults, directories: Iterable[str], sync_delay_ms: int, write_delay_ms: int | None) -> Faults:
    """Set the delays of these log directories. Zeros end them; None keeps the delay of writes."""
    slowed = {}
    for path in directories:
        disk = msgspec.structs.replace(_disk(faults, path), sync_delay_ms=sync_delay_ms)
        slowed[path] = disk if write_delay_ms is None else msgspec.structs.replace(disk, write_delay_ms=write_delay_ms)
    return _with_disks(faults, slowed)


def disks_mended(faults: Faults) -> Faults:
    return msgspec.structs.replace(faults, disks={})


def link_cut(faults: Faults, peer: int, *, sent: bool, received: bool) -> Faults:
    """Cut the directions that are given, in addition to those that are cut already."""
    link = faults.links.get(peer, Link())
    cut = msgspec.structs.replace(
        link, loses_sent=link.loses_sent or sent, loses_received=link.loses_received or received
    )
    return msgspec.structs.replace(faults, links={**faults.links, peer: cut})


def link_slowed(faults: Faults, peer: int, delay_ms: int) -> Faults:
    """Set the delay. Zero ends it."""
    links = {**faults.links, peer: msgspec.structs.replace(faults.links.get(peer, Link()), delay_ms=delay_ms)}
    return msgspec.structs.replace(faults, links={id: link for id, link in links.items() if link != Link()})


def zookeeper_cut(faults: Faults) -> Faults:
    return msgspec.structs.replace(faults, zookeeper_is_cut=True)


def zookeeper_healed(faults: Faults) -> Faults:
    return msgspec.structs.replace(faults, zookeeper_is_cut=False)


def isolated(faults: Faults) -> Faults:
    return msgspec.structs.replace(faults, is_isolated=True)


def network_slowed(faults: Faults, delay_ms: int) -> Faults:
    return msgspec.structs.replace(faults, delay_ms=delay_ms)


def clock_moved(faults: Faults, by_ms: int) -> Faults:
    """Move the wall clock in addition to earlier moves, but not further than it can be."""
    offset_ms = min(max(faults.clock_offset_ms + by_ms, -MAX_CLOCK_OFFSET_MS), MAX_CLOCK_OFFSET_MS)
    return msgspec.structs.replace(faults, clock_offset_ms=offset_ms)


def connections_dropped(faults: Faults) -> Faults:
    return msgspec.structs.replace(faults, drops=faults.drops + 1)


def healed(faults: Faults) -> Faults:
    """Return the end of all faults."""
    return Faults(revision=faults.revision, drops=faults.drops)


def healed_towards(faults: Faults, peer: int) -> Faults:
    """Return the end of the faults between this broker and the other one."""
    return msgspec.structs.replace(faults, links={id: link for id, link in faults.links.items() if id != peer})


def has_any(faults: Faults) -> bool:
    return faults != healed(faults)


def has_failed_disk(faults: Faults) -> bool:
    return any(disk.is_full or disk.is_broken for disk in faults.disks.values())


def are_cut_apart(faults: Mapping[int, Faults], opener: int, other: int) -> bool:
    """Return whether broker `opener` cannot use connections that it opens to the other one, by the faults of each."""
    of_opener, of_other = faults.get(opener, Faults()), faults.get(other, Faults())
    link = of_opener.links.get(other, Link())
    return of_opener.is_isolated or of_other.is_isolated or link.loses_sent or link.loses_received


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
    if faults.is_isolated:
        found.append("it is isolated")
    if faults.zookeeper_is_cut:
        found.append("it is cut from ZooKeeper")
    if faults.clock_offset_ms:
        side = "ahead" if faults.clock_offset_ms > 0 else "behind"
        found.append(f"its wall clock is {_duration(abs(faults.clock_offset_ms))} {side}")
    if faults.delay_ms:
        found.append(f"each packet that it sends takes {faults.delay_ms} ms longer")
    for peer, link in sorted(faults.links.items()):
        if link.loses_sent and link.loses_received:
            found.append(f"it is cut from broker {peer}")
        elif link.loses_sent:
            found.append(f"nothing that it sends arrives at broker {peer}")
        elif link.loses_received:
            found.append(f"nothing that broker {peer} sends arrives")
        if link.delay_ms:
            found.append(f"each packet between it and broker {peer} takes {link.delay_ms} ms longer")
    return found


def _duration(milliseconds: int) -> str:
    """Return it in the largest unit of which it is a whole number."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if milliseconds % size == 0:
            return f"{milliseconds // size} {unit}"
    return f"{milliseconds} ms"


def _disk(faults: Faults, path: str) -> DiskFaults:
    return faults.disks.get(path, DiskFaults())


def _with_disks(faults: Faults, changed: dict[str, DiskFaults]) -> Faults:
    disks = {path: disk for path, disk in {**faults.disks, **changed}.items() if disk != DiskFaults()}
    return msgspec.structs.replace(faults, disks=disks)
