"""A whole cluster on the virtual World: real brokers with their controllers, in one process, on virtual time.

    async def scenario() -> None:
        cluster = VirtualCluster(Simulation())
        await cluster.start()
        client = cluster.client("client")
        await client.process.run(program(client, cluster.bootstrap))
        cluster.kill_broker(0)

    run(scenario(), seed=7)

Each broker has its own host `broker-N`; all listen on the same ports. It runs as in `minibroker.broker.__main__`: it
starts, then serves until it fails. A broker that fails by itself ends its process, and the run fails, unless the
cluster has `on_broker_failure`: that function is called after the process has ended.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Mapping
from contextvars import Context

from minibroker.broker.broker import Broker
from minibroker.broker.metrics.disk_times import TimedWorld
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.parsing import broker_config
from minibroker.deploy.simulator.process import Process
from minibroker.deploy.simulator.waiting import until
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol import znodes
from minibroker.protocol.model import CONTROL_LISTENER, DEFAULT_LISTENER, LeaderAndIsr, TopicPartition

PORT = 9092
CONTROL_PORT = 9093
LOG_DIR = "/var/lib/minibroker"
ZOOKEEPER = "zookeeper:2181"
SECRET = "what all brokers of a virtual cluster know"

NO_OFFSETS_TOPIC = {"offsets.topic.replication.factor": "1000"}
"""More replicas than brokers, so `__consumer_offsets` is never created. For tests that inspect all existing topics."""

_POLL_S = 0.01


class VirtualCluster:
    """`brokers` brokers from `first_id` on, and their ZooKeeper. `settings` are broker settings by Kafka's names.

    `log_dirs` is the number of log directories of each broker, `log_dir(number)`. Each of them can fail on its own:
    see `break_log_dir`."""

    def __init__(
        self,
        simulation: Simulation,
        brokers: int = 3,
        settings: Mapping[str, str] | None = None,
        on_broker_failure: Callable[[int, Exception], None] | None = None,
        secret: str | None = SECRET,
        log_dirs: int = 1,
        first_id: int = 0,
    ) -> None:
        self.simulation = simulation
        self._on_broker_failure = on_broker_failure
        self.broker_ids = tuple(range(first_id, first_id + brokers))
        self.bootstrap = ",".join(f"{host_name(broker_id)}:{PORT}" for broker_id in self.broker_ids)
        self._secret = secret
        self._settings = dict(settings or {})
        if log_dirs > 1:
            self._settings["log.dirs"] = ",".join(log_dir(number) for number in range(log_dirs))
        self.own_settings: dict[int, dict[str, str]] = {}
        """Settings by broker; they apply from the broker's next start."""
        self._processes: dict[int, Process] = {}
        self._brokers: dict[int, Broker] = {}
        self._stopping: set[Broker] = set()
        """Brokers that stop or have stopped: each is stopped once."""

    # -- processes --

    async def start(self) -> None:
        """Start all brokers, and wait until they are registered and accept requests."""
        await asyncio.gather(*(self.start_broker(broker_id) for broker_id in self.broker_ids))

    async def start_broker(self, broker_id: int) -> Broker:
        """Start a broker on its host's disk.

        If it cannot start, its process is killed and its error is raised; ProcessKilled if it is killed meanwhile.
        """
        world = self.simulation.host(host_name(broker_id)).start_process()

        async def start() -> Broker:
            config = self._config(broker_id)
            broker = Broker(TimedWorld(world, config.log_directories(), world.clock.running_s), config)
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
                return  # `stop` reports the failure
            self._stopping.add(broker)
            try:
                await broker.stop(clean=False)
            except Exception as second:  # noqa: BLE001 - the process ends anyway, as a real one does
                error.add_note(f"and then, while it stopped: {second!r}")
            if not process.alive:
                return  # it was killed while it stopped; the loop is closing this coroutine
            process.kill()
            Context().run(self._broker_failed, broker_id, error)  # without an owner: the process is dead

    def _broker_failed(self, broker_id: int, error: Exception) -> None:
        if self._on_broker_failure is not None:
            self._on_broker_failure(broker_id, error)
        else:
            context = {"message": f"broker {broker_id} failed", "exception": error}
            self.simulation.loop.call_exception_handler(context)

    def kill_broker(self, broker_id: int) -> None:
        """Send SIGKILL. Written data survives."""
        self._processes[broker_id].kill()

    def power_cut(self, broker_id: int) -> None:
        """Cut the power of the broker's host: it dies without closing connections, and unsynced data may be lost."""
        self.simulation.host(host_name(broker_id)).power_cut()

    def break_log_dir(self, broker_id: int, number: int, error: int = errno.EIO) -> None:
        """Let each call in that log directory fail until `mend_log_dir`; the broker notices at the first."""
        self.simulation.host(host_name(broker_id)).disk.faults.break_directory(log_dir(number), error)

    def hang_log_dir(self, broker_id: int, number: int) -> None:
        """Let each call of a worker thread in that log directory hang until `mend_log_dir`."""
        self.simulation.host(host_name(broker_id)).disk.faults.hang_directory(log_dir(number))

    def mend_log_dir(self, broker_id: int, number: int) -> None:
        """Repair a log directory. The broker uses it after its next start. Data of failed syncs is lost."""
        self.simulation.host(host_name(broker_id)).disk.faults.mend_directory(log_dir(number))

    def pause_broker(self, broker_id: int) -> None:
        """SIGSTOP."""
        self._processes[broker_id].pause()

    def resume_broker(self, broker_id: int) -> None:
        """SIGCONT. Has no effect if the broker is not paused or has been killed."""
        self._processes[broker_id].resume()

    async def stop_broker(self, broker_id: int) -> None:
        """Shut a broker down in a controlled way: it hands over its leaderships first. If it has just failed, wait for
        its end."""
        process, broker = self._processes[broker_id], self._brokers[broker_id]
        await process.run(broker.hand_over())
        if broker in self._stopping:
            await self.until(lambda: not process.alive)
            return
        self._stopping.add(broker)
        await process.run(broker.stop())
        process.kill()

    def client(self, name: str) -> VirtualWorld:
        """Start a process for clients on the host of that name."""
        return self.simulation.host(name).start_process()

    # -- state --

    def broker(self, broker_id: int) -> Broker:
        """The broker that was started last under this id."""
        return self._brokers[broker_id]

    def living_broker(self, broker_id: int) -> Broker | None:
        """The broker, if it has started and lives (it may be paused)."""
        return self._brokers.get(broker_id) if self._processes[broker_id].alive else None

    def process(self, broker_id: int) -> Process:
        """The process that was started last under this id."""
        return self._processes[broker_id]

    def living(self) -> list[int]:
        """The brokers whose process lives; it may be starting or paused."""
        return [broker_id for broker_id in self.broker_ids if self._processes[broker_id].alive]

    def active_controllers(self) -> list[int]:
        """The living brokers that consider themselves the controller."""
        brokers = {broker_id: self.living_broker(broker_id) for broker_id in self.broker_ids}
        return [i for i, broker in brokers.items() if broker and broker.controller and broker.controller.is_active]

    def state(self, partition: TopicPartition) -> LeaderAndIsr:
        """The state of a partition in ZooKeeper."""
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
                "internal.segment.bytes.min": "14",
                "offsets.topic.num.partitions": "1",  # every cluster creates these partitions, and few tests use groups
            }
            | ({} if self._secret is None else {"broker.secret": self._secret})
            | self._settings
            | self.own_settings.get(broker_id, {})
        )


def log_dir(number: int) -> str:
    """The path of a log directory, for a broker with several."""
    return f"{LOG_DIR}-{number}"


def host_name(broker_id: int) -> str:
    return f"broker-{broker_id}"
