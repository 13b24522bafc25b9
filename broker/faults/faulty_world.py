"""The real World with the faults of a file."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from minibroker.broker.faults.fault_file import FaultFile
from minibroker.broker.faults.faulty_disk import FaultyDisk
from minibroker.broker.faults.faulty_network import FaultyNetwork
from minibroker.protocol.faults import Faults
from minibroker.protocol.world import Beside, Clock, Disk, Executor, Network, World, ZooKeeper
from minibroker.protocol.world.real import RealWorld


class FaultyClock:
    """See `minibroker.protocol.world.Clock`. `faults` returns the present ones."""

    def __init__(self, clock: Clock, faults: Callable[[], Faults]) -> None:
        self._clock = clock
        self._faults = faults

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def wall_ms(self) -> int:
        return self._clock.wall_ms() + self._faults().clock_offset_ms

    def observed_ms(self) -> int:
        return self._clock.wall_ms()


class FaultyWorld:
    """See `minibroker.protocol.world.World`. The faults hold from the beginning."""

    def __init__(self, world: RealWorld, file: FaultFile) -> None:
        self._world = world
        self._file = file
        self.clock: Clock = FaultyClock(world.clock, lambda: file.current)
        self.network: Network = FaultyNetwork(world.network, file)
        self.disk: Disk = FaultyDisk(world.disk, lambda: file.current)
        self.zookeeper: ZooKeeper = world.zookeeper
        self.random: Random = world.random
        file.start()

    def on_healed_disk(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with each log directory whose faults have ended, in the thread that reads the file."""
        faulty = set(self._file.current.disks)

        def changed(faults: Faults) -> None:
            for healed in faulty - faults.disks.keys():
                listener(healed)
            faulty.clear()
            faulty.update(faults.disks)

        self._file.on_change(changed)

    def new_executor(self, name: str) -> Executor:
        return self._world.new_executor(name)

    def beside(self, main: Callable[[World], Coroutine[Any, Any, None]], name: str) -> Beside:
        return self._world.beside(main, name)

    def close(self) -> bool:
        """See `RealWorld.close`."""
        self._file.close()
        return self._world.close()
