"""Break the connection that watches a broker while its listener is too busy to accept another one.

    python -m tests.faults.false_alarms [--rounds 1000]

The listener's queue is full when the connection breaks, so the kernel drops the next request for a connection, and is
emptied 20 ms later. TCP repeats the request after a second, which is longer than `broker.crash.detection.ms`. The
broker must not be suspected. Exit code 1 if it was.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import struct
import sys

from minibroker.controller.governing.crash_detection import PROVEN_S, CrashDetector
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.protocol.model import CONTROL_LISTENER, Endpoint, RegisteredBroker
from minibroker.protocol.world.real import RealClock, RealNetwork

DETECTION_MS = 500
"""The default of `broker.crash.detection.ms`."""
BUSY_S = 0.02
WITHIN_S = 10.0


async def at_once() -> None:
    """ZooKeeper's answer."""


async def _accepted(listener: socket.socket) -> socket.socket:
    async with asyncio.timeout(WITHIN_S):
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    return connection


def _fill(listener: socket.socket) -> list[socket.socket]:
    """Fill the queue of the listener; return the connections in it."""
    fillers: list[socket.socket] = []
    while len(fillers) < 10:
        filler = socket.socket()
        filler.settimeout(BUSY_S)
        fillers.append(filler)
        try:
            filler.connect(listener.getsockname())
        except TimeoutError:
            return fillers
    raise RuntimeError(f"{len(fillers)} connections do not fill a queue without room")


async def _is_watching(listener: socket.socket, watched_from: list[tuple[str, int]]) -> socket.socket:
    """Return the detector's connection, which is none of `watched_from`."""
    while True:
        connection = await _accepted(listener)
        if connection.getpeername() not in watched_from:
            return connection
        connection.close()


async def suspicions_in(rounds: int) -> list[str]:
    """Return the reasons for which the listener was suspected. Raises TimeoutError if it is watched no longer for
    another reason."""
    suspected: list[str] = []
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(0)
        listener.setblocking(False)
        port = listener.getsockname()[1]
        detector = CrashDetector(RealNetwork(), RealClock(), DETECTION_MS, at_once)
        detector.on_suspicion(lambda broker_id, epoch, reason: suspected.append(reason))
        detector.follow([RegisteredBroker(1, 1, (Endpoint(CONTROL_LISTENER, LOOPBACK, port),))])
        try:
            watching = await _accepted(listener)
            for _ in range(rounds):
                await asyncio.sleep(PROVEN_S)
                fillers = _fill(listener)
                names = [filler.getsockname() for filler in fillers]
                watching.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                watching.close()
                await asyncio.sleep(BUSY_S)
                for filler in fillers:
                    filler.close()
                try:
                    watching = await _is_watching(listener, names)
                except TimeoutError:
                    if suspected:  # so it is watched no longer
                        break
                    raise
            watching.close()
        finally:
            await detector.close()
    return suspected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1_000)
    arguments = parser.parse_args()
    let_signals_interrupt()
    suspected = asyncio.run(suspicions_in(arguments.rounds))
    print(f"{arguments.rounds} rounds, {len(suspected)} suspicions {suspected[:3]}")
    sys.exit(1 if suspected else 0)


if __name__ == "__main__":
    main()
