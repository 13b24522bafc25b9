"""A whole cluster on the virtual World: real brokers with their controllers, in one process, on virtual time.

    async def scenario() -> None:
        cluster = VirtualCluster(Simulation())
        await cluster.start()
        client = cluster.client("client")
        await client.process.run(program(client, cluster.bootstrap))
        cluster.kill_broker(0)

    run(scenario(), seed=7)

Every broker has a host `broker-N` of its own, and listens on the same ports there. It runs as
`minibroker.broker.__main__` runs it: started, then served until it fails. A broker that fails by itself ends its
process, and the run fails with it, unless the cluster was given `on_broker_failure`: that is then told of it, when the
process has ended.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Mapping
from contextvars import Context

from minibroker.broker.broker import Broker
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.parsing import broker_config
from minibroker.protocol import znodes
from minibroker.protocol.model import CONTROL_LISTENER, DEFAULT_LISTENER, LeaderAndIsr, TopicPartition
from tests.simulation.simulator.process import Process
from tests.simulation.simulator.world import Simulation, VirtualWorld
from tests.waiting import until

PORT = 9092
CONTROL_PORT = 9093
LOG_DIR = "/var/lib/minibroker"
ZOOKEEPER = "zookeeper:2181"
SECRET = "what all brokers of a virtual cluster know"

NO_OFFSETS_TOPIC = {"offsets.topic.replication.factor": "1000"}
"""More than there are brokers: `__consumer_offsets` is never created. For tests that are about all topics there are."""

_POLL_S = 0.01


class VirtualCluster:
    """Brokers 0 to `brokers` - 1, and their ZooKeeper. `settings` are the brokers' own, by Kafka's names.

    With `log_dirs`, each broker has so many log directories, `log_dir(number)`, and each of them fails for itself:
    `break_log_dir`."""

    def __init__(
        self,
        simulation: Simulation,
        brokers: int = 3,
        settings: Mapping[str, str] | None = None,
        on_broker_failure: Callable[[int, Exception], None] | None = None,
        secret: str | None = SECRET,
        log_dirs: int = 1,
    ) -> None:
        self.simulation = simulation
        self._on_broker_failure = on_broker_failure
        self.broker_ids = tuple(range(brokers))
        self.bootstrap = ",".join(f"{host_name(broker_id)}:{PORT}" for broker_id in self.broker_ids)
        self._secret = secret
        self._settings = dict(settings or {})
        if log_dirs > 1:
            self._settings["log.dirs"] = ",".join(log_dir(number) for number in range(log_dirs))
        self.own_settings: dict[int, dict[str, str]] = {}
        """Of single brokers, from their next start on."""
        self._processes: dict[int, Process] = {}
        self._brokers: dict[int, Broker] = {}
        self._stopping: set[Broker] = set()
        """A process stops its broker once, whatever else happens meanwhile."""

    # -- processes --

    async def start(self) -> None:
        """Start all brokers, and wait until they are registered and serve."""
        await asyncio.gather(*(self.start_broker(broker_id) for broker_id in self.broker_ids))

    async def start_broker(self, broker_id: int) -> Broker:
        """Start a broker, with what its disk holds from before.

        Raises what keeps it from starting, and ProcessKilled where it is killed meanwhile; its process is dead then.
        """
        world = self.simulation.host(host_name(broker_id)).start_process()

        async def start() -> Broker:
            broker = Broker(world, self._config(broker_id))
            await broker.start()
            return broker

        self._processes[broker_id] = world.process
        self._brokers.pop(broker_id, None)
        try:
            broker = await world.process.run(start(), f"start of broker {broker_id}")
        except BaseException:
            world.process.kill()
            raise
        self._brokers[broker_id] = broker
        world.process.start(self._serve(broker_id, broker, world.process), f"broker {broker_id}")
        return broker

    async def _serve(self, broker_id: int, broker: Broker, process: Process) -> None:
        try:
            await broker.serve()
        except Exception as error:  # noqa: BLE001 - reported below
            if broker in self._stopping:
                return  # in good order, it was to be: `stop` sees the failure
            self._stopping.add(broker)
            try:
                await broker.stop(clean=False)
            except Exception as second:  # noqa: BLE001 - as in a real process, it ends all the same
                error.add_note(f"and then, while it stopped: {second!r}")
            if not process.alive:
                return  # killed while it stopped: these are its remains, which are being disposed of
            process.kill()
            Context().run(self._broker_failed, broker_id, error)  # nobody's: the process is dead

    def _broker_failed(self, broker_id: int, error: Exception) -> None:
        if self._on_broker_failure is not None:
            self._on_broker_failure(broker_id, error)
        else:
            context = {"message": f"broker {broker_id} failed", "exception": error}
            self.simulation.loop.call_exception_handler(context)

    def kill_broker(self, broker_id: int) -> None:
        """kill -9. What it has written is kept."""
        self._processes[broker_id].kill()

    def power_cut(self, broker_id: int) -> None:
        """Its host loses its power: the broker dies without a word, and what it had not synced may be gone."""
        self.simulation.host(host_name(broker_id)).power_cut()

    def break_log_dir(self, broker_id: int, number: int, error: int = errno.EIO) -> None:
        """Every call for what is in that log directory fails, until it is mended; the broker notices with the first."""
        self.simulation.host(host_name(broker_id)).disk.faults.break_directory(log_dir(number), error)

    def hang_log_dir(self, broker_id: int, number: int) -> None:
        """No call in a worker thread for what is in that log directory returns, until it is mended."""
        self.simulation.host(host_name(broker_id)).disk.faults.hang_directory(log_dir(number))

    def mend_log_dir(self, broker_id: int, number: int) -> None:
        """The broker takes it back when it starts again. What was not synced when a sync failed is lost."""
        self.simulation.host(host_name(broker_id)).disk.faults.mend_directory(log_dir(number))

    def pause_broker(self, broker_id: int) -> None:
        """SIGSTOP."""
        self._processes[broker_id].pause()

    def resume_broker(self, broker_id: int) -> None:
        """SIGCONT. Does nothing where the broker is not paused, or has been killed since."""
        self._processes[broker_id].resume()

    async def stop_broker(self, broker_id: int) -> None:
        """Stop a broker in good order: it hands over what it leads first. One that has failed just now stops as it
        is."""
        process, broker = self._processes[broker_id], self._brokers[broker_id]
        await process.run(broker.hand_over())
        if broker in self._stopping:
            await self.until(lambda: not process.alive)
            return
        self._stopping.add(broker)
        await process.run(broker.stop())
        process.kill()

    def client(self, name: str) -> VirtualWorld:
        """A process for clients, on the host of that name."""
        return self.simulation.host(name).start_process()

    # -- what can be seen from outside --

    def broker(self, broker_id: int) -> Broker:
        """The broker that was started last under this id, for tests to look into."""
        return self._brokers[broker_id]

    def living_broker(self, broker_id: int) -> Broker | None:
        """The broker, once it has started, as long as it lives (it may be paused)."""
        return self._brokers.get(broker_id) if self._processes[broker_id].alive else None

    def process(self, broker_id: int) -> Process:
        """The process that was started last under this id."""
        return self._processes[broker_id]

    def living(self) -> list[int]:
        """Those whose process lives; it may be starting, or paused."""
        return [broker_id for broker_id in self.broker_ids if self._processes[broker_id].alive]

    def active_controllers(self) -> list[int]:
        """The living brokers that take themselves for the controller."""
        brokers = {broker_id: self.living_broker(broker_id) for broker_id in self.broker_ids}
        return [i for i, broker in brokers.items() if broker and broker.controller and broker.controller.is_active]

    def state(self, partition: TopicPartition) -> LeaderAndIsr:
        """What ZooKeeper says of a partition."""
        path = znodes.state_path(partition)
        zookeeper = self.simulation.zookeeper
        return znodes.decode_state(partition, zookeeper.data(path), zookeeper.stat(path).version)

    async def until(self, condition: Callable[[], object], within_s: float = 60) -> None:
        """Wait in virtual time until the condition is true. Raises TimeoutError."""
        await until(condition, within_s, _POLL_S)

    def _config(self, broker_id: int) -> BrokerConfig:
        host = host_name(broker_id)
        return broker_config(
            {
                "broker.id": str(broker_id),
                "log.dirs": LOG_DIR,
                "zookeeper.connect": ZOOKEEPER,
                "listeners": f"{DEFAULT_LISTENER}://{host}:{PORT},{CONTROL_LISTENER}://{host}:{CONTROL_PORT}",
                "offsets.topic.num.partitions": "1",  # every cluster creates them, and few tests have groups
            }
            | ({} if self._secret is None else {"broker.secret": self._secret})
            | self._settings
            | self.own_settings.get(broker_id, {})
        )


def log_dir(number: int) -> str:
    """Of a broker that has several."""
    return f"{LOG_DIR}-{number}"


def host_name(broker_id: int) -> str:
    """The host of a broker."""
    return f"broker-{broker_id}"
