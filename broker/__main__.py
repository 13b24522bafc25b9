"""The process of a broker: arguments, signals, exit code.

    python -m minibroker.broker [--properties FILE] [--override NAME=VALUE]... [--faults FILE]

Prints one line `TIME ready broker.id=N port=P` to stdout once it serves; logs to stderr. SIGTERM and SIGINT stop it
cleanly (exit code 0): it moves its leaders to other brokers first, and prints one line `TIME handed over: ...`. A
second signal ends that wait. If it cannot start or fails, it prints one line `error: ...` on stderr (exit code 1). The
environment variable MINIBROKER_LOG_LEVEL sets the log level. With `--faults`, its World fails as the
file says (`faults`); without, nothing can make them fail. `log_format` keeps logged text from looking like these
lines.
"""

import argparse
import asyncio
import gc
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence

import uvloop
from prometheus_client import ProcessCollector

from minibroker.broker import log_format
from minibroker.broker.broker import Broker
from minibroker.broker.faults.fault_file import FaultFile
from minibroker.broker.faults.faulty_world import FaultyWorld
from minibroker.broker.freed_memory import return_freed_memory
from minibroker.broker.metrics.disk_times import TimedWorld
from minibroker.broker.metrics.running_time import RunningTime
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.credentials import zookeeper_digest, zookeeper_tls
from minibroker.broker.settings.parsing import broker_config, read_properties
from minibroker.broker.settings.types import InvalidConfig
from minibroker.controller.zookeeper import KazooZooKeeper
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.words import printable
from minibroker.protocol.world.real import RealWorld

logger = logging.getLogger("minibroker.broker")

LOG_LEVEL = "MINIBROKER_LOG_LEVEL"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_SAID = logging.Formatter("%(asctime)s.%(msecs)03d %(message)s", log_format.TIME_FORMAT)
OWNER_ONLY = 0o077
"""The mask by which only the broker's user can read the records and settings that it writes."""
LARGE_BLOCK_BYTES = 16 * 1024 * 1024
YOUNG_OBJECTS = 10_000
"""New objects between two collections of the youngest generation. Python's default is 700."""
YOUNG_COLLECTIONS = 3
"""Collections of the youngest generation between two of the next one. Python's default, 10, takes a controller with ten
thousand partitions 30 to 70 ms at a time."""
LONG_COLLECTION_S = 0.005
SWITCH_INTERVAL_S = 0.0005
"""Seconds after which a thread asks for the interpreter lock. Python's default is 0.005."""


def _parse(arguments: Sequence[str]) -> tuple[BrokerConfig, str | None]:
    """Return the settings, and the path of the file with faults, if any. Raises InvalidConfig."""
    parser = argparse.ArgumentParser(prog="python -m minibroker.broker", description="Run one broker.")
    parser.add_argument("--properties", metavar="FILE", help="settings, one NAME=VALUE a line")
    parser.add_argument("--override", metavar="NAME=VALUE", action="append", default=[], help="overrides the file")
    parser.add_argument("--faults", metavar="FILE", help="for tests: let the World of this broker fail as it says")
    parsed = parser.parse_args(arguments)
    values = read_properties(parsed.properties) if parsed.properties else {}
    for text in parsed.override:
        name, separator, value = text.partition("=")
        if not separator:
            raise InvalidConfig(f"--override {text!r} is not NAME=VALUE")
        values[name.strip()] = value.strip()
    return broker_config(values), parsed.faults


async def _run(config: BrokerConfig, world: TimedWorld) -> None:
    broker = Broker(world, config, ProcessCollector(registry=None).collect)
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (hurry if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    started = asyncio.create_task(broker.start(), name="start")
    stop_asked = asyncio.create_task(stopping.wait(), name="signal")
    returning = asyncio.create_task(return_freed_memory(), name="return of freed memory")
    try:
        await asyncio.wait([started, stop_asked], return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            await asyncio.gather(started, return_exceptions=True)
            return
        started.result()
        _say(f"ready broker.id={config.broker_id} port={broker.port}")
        served = asyncio.create_task(broker.serve(), name="serve")
        await asyncio.wait([served, stop_asked], return_when=asyncio.FIRST_COMPLETED)
        try:
            if not served.done():
                await _hand_over(broker, served, hurry)
        finally:
            failed = served.done()
            served.cancel()
            await broker.stop(clean=not failed)
        if failed:
            served.result()
    finally:
        stop_asked.cancel()
        returning.cancel()
        await asyncio.gather(returning, return_exceptions=True)


async def _hand_over(broker: Broker, served: "asyncio.Task[None]", hurry: asyncio.Event) -> None:
    """Hand over until it is done, the broker fails, or a second signal arrives."""
    handing_over = asyncio.create_task(broker.hand_over(), name="controlled shutdown")
    hurried = asyncio.create_task(hurry.wait(), name="second signal")
    await asyncio.wait([served, handing_over, hurried], return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    handing_over.cancel()
    await asyncio.wait([handing_over])
    if not handing_over.cancelled() and (handed_over := handing_over.result()) is not None:
        _say(f"handed over: {handed_over.as_json()}")


def _say(text: str) -> None:
    """Print the text with the time in the format of the log, at any log level."""
    print(_SAID.format(logging.makeLogRecord({"msg": text})), flush=True)


def _say_error(text: str) -> None:
    print(f"error: {printable(text)}", file=sys.stderr, flush=True)


def _log_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Log it like everything else: Python would print the lines of the exception's text as they are."""
    error = unraisable.exc_value
    logger.error("exception ignored in %r", unraisable.object, exc_info=error if error is not None else False)


def _log_of_thread(failed: threading.ExceptHookArgs) -> None:
    """See `_log_unraisable`."""
    name = "" if failed.thread is None else failed.thread.name
    error = failed.exc_value
    logger.error("thread %s has failed", name, exc_info=error if error is not None else False)


def _keep_freed_memory() -> None:
    """Make glibc keep the freed blocks of large requests and responses.

    By default, glibc returns freed blocks of 128 KiB and more to the kernel, and the top of the heap as well. Each
    large request or response then causes page faults, half of the whole cost for 64 KiB. When a block of some size is
    first freed, glibc concludes that such blocks are common, and then keeps up to twice as much. Freeing one block of
    the size of a large response therefore suffices. Other allocators ignore this. Rejected: mallopt through ctypes,
    which is longer.
    """
    bytearray(LARGE_BLOCK_BYTES)


def _bound_pauses_of_the_collector() -> None:
    """Bound the pauses of Python's garbage collector.

    The collector blocks the event loop while it traverses all objects: 20 ms for a fresh broker, and 60 ms more per
    thousand replicas. Objects that have survived two collections, the second of which took long, are therefore frozen,
    so that each collection only traverses newer ones. References are still counted, and free nearly everything here;
    the cost is the cyclic garbage that frozen objects may become. Collections of young objects are made rarer, because
    most of these belong to requests in flight.
    """
    began_s = 0.0

    def after(phase: str, info: dict[str, int]) -> None:
        nonlocal began_s
        if phase == "start":
            began_s = time.perf_counter()
        elif info["generation"] >= 1 and time.perf_counter() - began_s >= LONG_COLLECTION_S:
            gc.freeze()

    gc.callbacks.append(after)
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_COLLECTIONS, 10)
    gc.collect()


def _let_other_threads_in_soon() -> None:
    """Shorten the time after which a waiting thread takes over from the event loop's. ZooKeeper's thread must run twice
    for each write, to send it and to read the answer, and a controller that moves ten thousand partitions, with a busy
    loop, makes a hundred writes one after the other."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def _allow_many_files() -> None:
    """Raise the limit of open files to the hard limit, as a JVM does. Shells and systemd set a soft limit of 1,024 for
    programs that use `select`; a broker has a file open per segment and a connection per client."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _log_level() -> str:
    return (os.environ.get(LOG_LEVEL) or "INFO").upper()


def log_level_problem() -> str | None:
    if _log_level() in LOG_LEVELS:
        return None
    return f"{LOG_LEVEL}={os.environ[LOG_LEVEL]}: give {', '.join(LOG_LEVELS[:-1])} or {LOG_LEVELS[-1]}"


def main(arguments: Sequence[str] | None = None) -> int:
    os.umask(OWNER_ONLY)
    _keep_freed_memory()
    _let_other_threads_in_soon()
    _allow_many_files()
    _bound_pauses_of_the_collector()
    problem = log_level_problem()
    if problem is not None:
        _say_error(problem)
        return 1
    log_format.configure(_log_level(), sys.stderr)
    sys.unraisablehook = _log_unraisable
    threading.excepthook = _log_of_thread
    zookeeper = KazooZooKeeper()
    real = RealWorld(zookeeper)
    world: RealWorld | FaultyWorld = real
    status = 0
    try:
        config, faults = _parse(sys.argv[1:] if arguments is None else arguments)
        if faults is not None:
            file = FaultFile(faults, real.disk)
            zookeeper.cut_when(lambda: file.current.zookeeper_is_cut or file.current.is_isolated)
            world = FaultyWorld(real, file)
        digest = zookeeper_digest(config, world.disk)
        if digest is not None:
            zookeeper.authenticate(
                digest, sets_acl=config.zookeeper_set_acl, sets_root_acl=config.zookeeper_set_root_acl
            )
        contexts = zookeeper_tls(config)
        if contexts is not None:
            zookeeper.encrypt(contexts)
        with RunningTime(real.clock.monotonic) as running:
            timed = TimedWorld(world, config.log_directories(), running.seconds)
            if isinstance(world, FaultyWorld):
                world.on_healed_disk(timed.disk_times.healed)
            uvloop.run(_run(config, timed))
    except MinibrokerError as error:
        _say_error(str(error))
        status = 1
    if not world.close():
        _say_error("a disk hangs; not waiting for it")
        os._exit(status)  # the interpreter would wait for the threads
    return status


if __name__ == "__main__":
    sys.exit(main())
