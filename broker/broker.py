"""A broker on a World: the composition root, which creates all parts and starts and stops them in order.

The order of the start: bind (so that a taken port is reported first, and a free one is known before it is registered)
and serve metrics, since the rest may take long; ZooKeeper session and cluster id; data directories and recovery; then
serve and register. Controllers see the broker only when it can handle their orders; orders wait until the broker knows
the epoch of its registration.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from itertools import chain

from prometheus_client.core import Metric

from minibroker.broker.cluster.forwarding import ForwardingManager
from minibroker.broker.cluster.internal_topics import internal_topics
from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.cluster.peers import Peers
from minibroker.broker.cluster.shutdown import ControlledShutdown, HandedOver
from minibroker.broker.groups.coordination import GroupCoordination
from minibroker.broker.handlers.authorization import Authorizer
from minibroker.broker.handlers.auto_topic_creation import AutoTopicCreation
from minibroker.broker.handlers.coordinated_transactions import extend_all
from minibroker.broker.handlers.dispatch import dispatcher
from minibroker.broker.handlers.fetch import MOST_WAITING_BYTES
from minibroker.broker.handlers.metadata import ELECTIONS
from minibroker.broker.handlers.sasl import SaslServer
from minibroker.broker.handlers.services import ControlEpoch, Services
from minibroker.broker.metrics.disk_times import TimedWorld
from minibroker.broker.metrics.listener import MetricsListener
from minibroker.broker.metrics.loop_lag import LoopLag
from minibroker.broker.metrics.metrics import BrokerMetrics, exposition, recovery_metrics
from minibroker.broker.metrics.timeline_file import TimelineStore
from minibroker.broker.network.handler_pool import Continuation
from minibroker.broker.network.server import Request, SocketServer
from minibroker.broker.network.settings import NetworkSettings
from minibroker.broker.quotas.entities import Quotas, connection_rates
from minibroker.broker.quotas.mutations import ControllerMutationQuotaManager
from minibroker.broker.quotas.stored import QuotaReader
from minibroker.broker.quotas.throttling import ClientQuotaManager
from minibroker.broker.replication.manager import ReplicaManager
from minibroker.broker.replication.transcoding import Transcoder
from minibroker.broker.replication.upkeep.healing import tell_before_the_end, tell_of_lost_replicas
from minibroker.broker.scheduling.budget import FairBudget
from minibroker.broker.scheduling.purgatory import DelayedOperation, Purgatory, Timer
from minibroker.broker.scheduling.slices import SlicedCalls
from minibroker.broker.scheduling.supervisor import Supervisor
from minibroker.broker.security.acl_store import AclStore
from minibroker.broker.security.authorizer import AclAuthorizer
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.certificates import Certificates
from minibroker.broker.settings.credentials import broker_secret
from minibroker.broker.settings.dynamic_config import DynamicConfigManager
from minibroker.broker.settings.parsing import (
    CREATION_RATE,
    MAX_CONNECTIONS,
    METRICS,
    host_limits,
    listener_limits,
    topic_config_problem,
)
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.broker.storage.manager import LogManager
from minibroker.broker.transactions.coordination import TransactionCoordination
from minibroker.broker.transactions.producer_ids import ProducerIds
from minibroker.broker.transactions.verification import TransactionVerifier
from minibroker.controller.controller import Controller, ControllerSettings
from minibroker.controller.governing.crash_detection import CrashDetector
from minibroker.controller.governing.crash_watch import CrashWatch
from minibroker.controller.governing.leadership import Leadership
from minibroker.controller.governing.registration import Registration
from minibroker.controller.timeline import CAPACITY
from minibroker.protocol import znodes
from minibroker.protocol.apis import Plane
from minibroker.protocol.connections.broker_connections import BrokerConnections
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.messages.transactions import AddPartitionsToTxnRequest, AddPartitionsToTxnResponse
from minibroker.protocol.model import DEFAULT_LISTENER, NO_EPOCH, OFFSETS_TOPIC, ZooKeeperContact
from minibroker.protocol.words import says_full_disk
from minibroker.protocol.world import (
    ConnectionLoss,
    Network,
    SessionExpired,
    ZooKeeperError,
    ZooKeeperSession,
)

logger = logging.getLogger("minibroker.broker")

SESSION_RETRY_S = 0.05
REGISTRATION_PATIENCE_S = 0.5
"""The maximum time that an order waits until this broker has heard of the registration that the order is meant for."""


class Broker:
    """One broker on a World. `start` it, then `serve` until it fails or until `stop`. The only class that knows all
    parts."""

    def __init__(
        self, world: TimedWorld, config: BrokerConfig, of_process: Callable[[], Iterable[Metric]] = tuple
    ) -> None:
        """`of_process`: further metrics to serve, of the process."""
        self.config = config
        self._of_process = of_process
        self.ports: dict[str, int] = {}
        self._world = world
        self._supervisor = Supervisor()
        self._metadata = MetadataCache()
        self._timer = Timer()
        self._topic_purgatory: Purgatory[DelayedOperation] = Purgatory("topic", self._timer)
        self._logs = LogDirs(
            world,
            config.log_directories(),
            config.broker_id,
            default_config=LogConfig(
                segment_bytes=config.log_segment_bytes,
                index_interval_bytes=config.log_index_interval_bytes,
                max_message_bytes=config.message_max_bytes,
            ),
            checkpoint_interval_ms=config.log_flush_offset_checkpoint_interval_ms,
        )
        self._certificates = Certificates(config, world)
        self._sasl = SaslServer(config, world)
        self._server = SocketServer(
            world,
            network_settings(config),
            self._dispatch,
            self._certificates,
            brokers_have_proofs=config.broker_secret_file is not None or config.broker_secret is not None,
            new_gate=self._sasl.new_gate,
        )
        self._sasl.metrics = self._server.metrics
        self._metrics_listener = MetricsListener(self._certificates.network(METRICS), self._render_metrics)
        self._loop_lag = LoopLag(world.clock.monotonic)
        self._metrics: BrokerMetrics | None = None
        self._services: Services | None = None
        self._replicas: ReplicaManager | None = None
        self._groups: GroupCoordination | None = None
        self._transactions: TransactionCoordination | None = None
        self._peers: Peers | None = None
        self._registration: Registration | None = None
        self._leadership: Leadership | None = None
        self._controller: Controller | None = None
        self._shutdown: ControlledShutdown | None = None
        self._timeline = TimelineStore(world.disk, self._logs)
        self._registered_again = asyncio.Event()
        self._why_it_ends = ""
        self._configs = DynamicConfigManager(config, world.clock, self._session)
        self._quotas = QuotaReader(self._quotas_changed)
        self._client_quotas = ClientQuotaManager(
            config.quota_window_num, config.quota_window_size_seconds, world.clock.monotonic
        )
        self._mutation_quotas = ControllerMutationQuotaManager(
            config.controller_quota_window_num, config.controller_quota_window_size_seconds, world.clock.monotonic
        )

    @property
    def port(self) -> int:
        """The port of the clients' listener: PLAINTEXT, or the first."""
        clients = [name for name in self.ports if name != self.config.control_plane_listener_name]
        return self.ports[DEFAULT_LISTENER if DEFAULT_LISTENER in self.ports else clients[0]]

    @property
    def metrics_port(self) -> int | None:
        """The port of the metrics; None if they are not served."""
        return self._metrics_listener.port

    @property
    def broker_epoch(self) -> int:
        return NO_EPOCH if self._registration is None else self._registration.broker_epoch

    @property
    def controller(self) -> Controller | None:
        """This broker's controller, in office or not."""
        return self._controller

    # -- life --

    async def start(self) -> None:
        """Start, and return once this broker is registered and serves. Raises MinibrokerError naming the problem; all
        parts started by then are stopped again."""
        try:
            await self._start()
        except BaseException:
            await self.stop(clean=False)
            raise

    async def _start(self) -> None:
        config, world = self.config, self._world
        secret = broker_secret(config, world.disk)
        if secret is None:
            logger.warning(
                "neither broker.secret.file nor broker.secret is set: anyone who can connect to this broker can send "
                "it a controller's orders and delete its data. Set one of them, the same on all brokers"
            )
        else:
            self._sasl.share_decoys(secret)
        connections = BrokerConnections(world, config.broker_id, secret, self._network_of)
        if self._certificates.has_files:
            self._supervisor.start(self._certificates.watch(), "certificates")
        control = config.control_plane_listener_name
        self.ports = await self._server.bind(
            [
                (e.listener, e.host, e.port, Plane.CONTROL if e.listener == control else Plane.DATA)
                for e in config.listener_endpoints()
            ]
        )
        config.advertised_endpoints(self.ports)  # reports invalid addresses before anything is registered
        metrics_address = config.metrics_address()
        if metrics_address is not None:
            await self._metrics_listener.bind(*metrics_address)
            self._metrics_listener.start()
            logger.info("broker %d serves /metrics on port %d", config.broker_id, self.metrics_port)
        registration = self._registration = Registration(
            world,
            zookeeper_connect=config.zookeeper_connect,
            session_timeout_ms=config.zookeeper_session_timeout_ms,
            connect_timeout_ms=config.zookeeper_connection_timeout_ms,
            broker_id=config.broker_id,
            trusted_since=lambda: self._logs.trusted_since,
            synced_since=lambda: self._logs.synced_since,
            secret=secret,
            rack=config.broker_rack,
        )
        await self._connect_to_zookeeper(registration)
        self._metadata.cluster_id = registration.cluster_id
        await self._configs.load(registration.usable_session)
        self._server.reconfigure(network_settings(self._configs.config))

        self._logs.on_offline(self._log_directory_failed)
        await self._logs.open(registration.cluster_id)
        self._timeline.open()

        self._replicas = ReplicaManager(
            world,
            self._configs.config,
            self._logs,
            self._metadata,
            self._supervisor,
            self._session,
            lambda: self.broker_epoch,
            connections,
            lambda: registration.is_connected,
            self._configs.read_broker_configs,
        )
        self._replicas.start()
        self._peers = Peers(config.broker_id, self._metadata, connections, "transaction-verification")
        verifier = TransactionVerifier(
            config.broker_id,
            self._metadata,
            self._peers,
            self._extend_transactions,
            lambda: self._configs.config.transaction_partition_verification_enable,
        )
        self._groups = GroupCoordination(
            world, config, self._metadata, self._replicas, self._supervisor.start, verifier.verify
        )
        self._groups.start()
        producer_ids = ProducerIds(config.broker_id, self._session)
        self._transactions = TransactionCoordination(
            world,
            config,
            self._metadata,
            self._replicas,
            connections,
            producer_ids,
            self._session,
            self._supervisor.start,
        )
        self._transactions.start()
        self._start_controller(registration, connections)
        assert self._controller is not None
        self._controller.timeline.restore(self._timeline.last(CAPACITY))
        self._replicas.orders.on_silent = self._controller.record_silent_broker
        self._replicas.waits.slow_commits.on_time_s = self._loop_lag.on_time_s
        self._configs.connect(
            self._broker_config_changed,
            self._topic_config_changed,
            self._replicas.settings.topics.names,
            self._read_users,
        )
        for keys in self._sasl.keys:
            self._supervisor.start(keys.follow(), f"keys at {keys.url}")
        if self._sasl.uses_scram:
            await self._sasl.scram.load(registration.usable_session)
        self._supervisor.start(self._configs.run(), "dynamic configuration")
        acls = await self._load_acls(registration, secret)
        forwarding = ForwardingManager(config.broker_id, self._metadata, connections)
        transcoder = Transcoder(self._replicas, world.new_executor("transcoding"))
        self._replicas.listeners.add(transcoder)
        self._replicas.fetchers.on_leader_found = lambda: self._topic_purgatory.check_soon(ELECTIONS)
        self._services = Services(
            metadata=self._metadata,
            replicas=self._replicas,
            producer_ids=producer_ids,
            administration=self._controller,
            forwarding=forwarding,
            groups=self._groups,
            transactions=self._transactions,
            verifier=verifier,
            auto_topic_creation=AutoTopicCreation(config, self._controller, forwarding, self._supervisor.start),
            transcoder=transcoder,
            in_turn=lambda call: self._server.unsent.in_turn(call),
            large_answers=lambda: self._server.large,
            waiting_fetches=FairBudget(MOST_WAITING_BYTES),
            topic_purgatory=self._topic_purgatory,
            metadata_answers=SlicedCalls(self._supervisor.start, "answers to Metadata"),
            control_epoch=ControlEpoch(),
            authorizer=Authorizer(config.broker_id, secret, world.random, world.clock.monotonic),
            sasl=self._sasl,
            acls=acls,
            configs=self._configs,
            client_quotas=self._client_quotas,
            mutation_quotas=self._mutation_quotas,
            sessions=self._session,
            registered_epoch=self._registered_epoch,
            zookeeper_contact=registration.contact,
            slow_disks=world.disk_times.slow,
            background=self._supervisor.start,
        )
        leadership = self._leadership
        assert leadership is not None
        self._shutdown = ControlledShutdown(
            config,
            self._metadata,
            self._replicas,
            connections,
            self._controller,
            lambda: leadership.controller_id,
            lambda: self.broker_epoch,
        )
        self._handle = dispatcher(self._services)
        self._server.start()
        if metrics_address is not None:
            parts = self._replicas, self._groups, self._transactions, verifier, self._controller, transcoder
            self._start_metrics(*parts, registration.contact)
        probe = self._loop_lag.probe(world.disk_times.running_s, self._lagged)
        self._supervisor.start(probe, "probe of the event loop's lag")
        registration.on_failure(self._supervisor.fail)
        await registration.start(self._configs.config.advertised_endpoints(self.ports))
        logger.info("broker %d serves on port %d", config.broker_id, self.port)

    async def _load_acls(self, registration: Registration, secret: bytes | None) -> AclAuthorizer | None:
        """Read the access control lists and keep them up to date, if there is to be an authorizer."""
        config = self.config
        if not config.authorizer_class_name:
            return None
        if secret is None and not config.super_users:
            logger.warning(
                "there is an authorizer, but neither broker.secret.file nor super.users is set: brokers can work "
                "together only if ACLs allow their principal ClusterAction on the cluster"
            )
        store = AclStore(self._world.clock, self._session, allows_if_no_pattern=config.allow_everyone_if_no_acl_found)
        await store.load(registration.usable_session)
        self._supervisor.start(store.run(), "access control lists")
        return AclAuthorizer(
            store,
            config.super_user_names(),
            self._metadata,
            self._world.clock.monotonic,
            auto_creates_topics=config.auto_create_topics_enable,
        )

    async def _connect_to_zookeeper(self, registration: Registration) -> None:
        try:
            await registration.connect()
        except (ZooKeeperError, ValueError) as error:
            raise MinibrokerError(
                f"no ZooKeeper session at zookeeper.connect={self.config.zookeeper_connect}: {error}"
            ) from error

    def _start_controller(self, registration: Registration, connections: BrokerConnections) -> None:
        config, world = self._configs.config, self._world
        detector = self._detector = CrashDetector(
            world.network,
            world.clock,
            config.broker_crash_detection_ms,
            self._in_touch,
            lambda endpoint: self._certificates.secured(endpoint.listener),
            connections.silent_proof,
        )
        watch = CrashWatch(
            config.broker_id,
            detector,
            self._session,
            self._supervisor.start,
            remove_controller=lambda controller_id, epoch, reason: remove_controller(controller_id, epoch, reason),
        )
        controller = self._controller = Controller(
            world,
            ControllerSettings(
                num_partitions=config.num_partitions,
                default_replication_factor=config.default_replication_factor,
                unclean_leader_election=config.unclean_leader_election_enable,
                min_insync_replicas=config.min_insync_replicas,
                max_broker_partitions=config.max_broker_partitions,
                durability=config.log_durability,
                deletes_topics=config.delete_topic_enable,
                auto_leader_rebalance=config.auto_leader_rebalance_enable,
                leader_imbalance_per_broker_percentage=config.leader_imbalance_per_broker_percentage,
                leader_imbalance_check_interval_s=config.leader_imbalance_check_interval_seconds,
                internal_topics=(internal_topics(config)[OFFSETS_TOPIC],),
            ),
            config.broker_id,
            connections=connections,
            probe=detector.probe,
            validate_config=lambda values: topic_config_problem(values, self._configs.config),
            read_defaults=self._configs.read_broker_configs,
            on_brokers_changed=watch.brokers_changed,
            request_resign=lambda reason: leadership.resign(reason),
            timeline_sink=self._timeline.write,
        )
        leadership = self._leadership = Leadership(
            world,
            config.broker_id,
            on_elected=controller.take_office,
            on_resign=controller.resign,
            on_controller=watch.controller_changed,
            on_removed=controller.record_removed_controller,
        )

        def remove_controller(controller_id: int, epoch: int, reason: str) -> None:
            controller.record_suspected_controller(controller_id, epoch, reason, detector.facts(controller_id))
            leadership.remove_crashed(controller_id, epoch)

        detector.on_suspicion(
            lambda broker_id, epoch, reason: controller.suspect(broker_id, epoch, reason, detector.facts(broker_id))
        )
        detector.on_suspicion(watch.suspected)
        leadership.start()
        registration.on_session(self._registered)
        registration.on_lost(
            lambda state: controller.session_lost(state, self._metadata.controller_epoch, registration.contact())
        )
        registration.on_back(lambda away_s: controller.zookeeper_is_back(away_s, self._metadata.controller_epoch))

    def _start_metrics(
        self,
        replicas: ReplicaManager,
        groups: GroupCoordination,
        transactions: TransactionCoordination,
        verifier: TransactionVerifier,
        controller: Controller,
        transcoder: Transcoder,
        contact: Callable[[], ZooKeeperContact],
    ) -> None:
        purgatories = [*replicas.waits.purgatories, *groups.members.purgatories(), self._topic_purgatory]
        self._metrics = BrokerMetrics(
            self._server,
            replicas,
            groups,
            transactions,
            verifier,
            self._logs,
            purgatories,
            controller,
            self._loop_lag,
            transcoder,
            self._client_quotas,
            contact,
            self._world.disk_times,
        )

    async def _render_metrics(self) -> bytes:
        parts = recovery_metrics(self._logs) if self._metrics is None else self._metrics.collect()
        return await exposition(chain(parts, self._of_process()), self._world.clock.monotonic)

    async def serve(self) -> None:
        """Wait until the broker fails, and raise its error."""
        # Shielded: a caller that stops waiting must not cancel the future that records failures.
        await asyncio.shield(self._supervisor.failure)

    async def hand_over(self) -> HandedOver | None:
        """Move this broker's leaders to other brokers, as far as possible, in bounded time. Call it before `stop`,
        while the broker serves; it may be cancelled. Returns None if `controlled.shutdown.enable` is off or the broker
        has not started."""
        if self._shutdown is None or not self.config.controlled_shutdown_enable:
            return None
        return await self._shutdown.run()

    async def stop(self, *, clean: bool = True) -> None:
        """Resign as controller, stop serving, end the session, and mark the data directories as clean. In that order:
        nothing may be appended after the mark, and other brokers wait for the end of the session.

        The first error is raised in the end. It prevents the mark, as does a task that failed before or meanwhile. The
        session ends and the files are closed in any case.
        """
        try:
            await self._stop_serving()
            if not self._supervisor.failure.cancelled():  # cancelled: all tasks have ended without a failure
                clean = False
        except BaseException:
            clean = False
            raise
        finally:
            broker_epoch = self.broker_epoch
            try:
                if self._registration is not None:
                    if self._why_it_ends:  # else the controller would only see that this broker is gone
                        await tell_before_the_end(self._session, self.config.broker_id, self._why_it_ends)
                    await self._registration.close()
            finally:
                await self._logs.close(clean=clean, broker_epoch=broker_epoch)
                self._timeline.close()

    async def _stop_serving(self) -> None:
        if self._leadership is not None:
            await self._leadership.close()
        if self._controller is not None:
            await self._controller.close()
            await self._detector.close()
        await self._server.close()
        await self._metrics_listener.close()
        await self._supervisor.close()
        if self._groups is not None:
            self._groups.close()
        if self._transactions is not None:
            self._transactions.close()
        if self._peers is not None:
            self._peers.close()
        if self._replicas is not None:
            await self._replicas.close()
        self._topic_purgatory.close()
        self._timer.close()

    # -- connections between the parts --

    async def _broker_config_changed(self, config: BrokerConfig) -> None:
        assert self._replicas is not None
        assert self._controller is not None
        assert self._registration is not None
        self._server.reconfigure(network_settings(config))
        self._registration.move(config.advertised_endpoints(self.ports))
        self._controller.defaults_changed(config.unclean_leader_election_enable, config.min_insync_replicas)
        await self._replicas.broker_config_changed(config)

    async def _topic_config_changed(self, topic: str, session: ZooKeeperSession) -> None:
        """Apply a topic's changed settings. Raises as `ReplicaSettings.topic_config_changed` does."""
        assert self._replicas is not None
        assert self._controller is not None
        self._controller.topic_config_changed(topic)
        if topic in self._replicas.settings.topics:
            await self._replicas.settings.topic_config_changed(topic, session)

    async def _read_users(self, path: str | None, session: ZooKeeperSession) -> None:
        """Read the quotas and credentials of the user or client at this path, or for None of all."""
        await self._quotas.read(path, session)
        if self._sasl.uses_scram:
            await self._sasl.scram.read(path, session)

    def _quotas_changed(self, quotas: Quotas) -> None:
        self._client_quotas.apply(quotas)
        self._mutation_quotas.apply(quotas)
        self._server.set_connection_rates(connection_rates(quotas))
        has_clients = any(entity.ip is None for entity in quotas)
        self._server.set_on_answer(self._client_quotas.on_answer if has_clients else None)

    async def _extend_transactions(self, body: AddPartitionsToTxnRequest) -> AddPartitionsToTxnResponse:
        """Answer as the coordinator of these transactions. Raises BrokerError while this broker starts."""
        if self._services is None:
            raise BrokerError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "the broker starts")
        return await extend_all(self._services, body)

    def _network_of(self, peer_id: int, host: str, port: int, listener: str | None) -> Network:
        """Return the network for a connection to this listener of a broker. None: it is not known yet; then it is the
        broker's listener with this address, or else the one for other brokers."""
        if listener is None:
            listener = self._metadata.listener_at(peer_id, host, port)
        return self._certificates.network(listener)

    async def _dispatch(self, request: Request) -> Continuation | None:
        return await self._handle(request)

    async def _session(self) -> ZooKeeperSession:
        """Return the ZooKeeper session, once there is one."""
        assert self._registration is not None
        while True:
            try:
                return self._registration.session
            except SessionExpired:
                await asyncio.sleep(SESSION_RETRY_S)

    async def _in_touch(self) -> None:
        """Wait until ZooKeeper has answered."""
        while True:
            try:
                await (await self._session()).exists(znodes.CONTROLLER_EPOCH)
                return
            except (ConnectionLoss, SessionExpired):
                await asyncio.sleep(SESSION_RETRY_S)

    async def _registered_epoch(self, at_least: int) -> int:
        """Return the broker epoch once it is at least the controller's value: the order may arrive before the answer to
        the registration that it follows from. Raises BrokerError(BROKER_ID_NOT_REGISTERED) if that takes too long: the
        answer may be lost or ZooKeeper away, and a newer controller's order may wait behind this one."""
        try:
            async with asyncio.timeout(REGISTRATION_PATIENCE_S):
                while self.broker_epoch < at_least:
                    self._registered_again.clear()
                    await self._registered_again.wait()
        except TimeoutError:
            raise BrokerError(
                ErrorCode.BROKER_ID_NOT_REGISTERED,
                f"the request is for broker epoch {at_least}, but this broker knows of {self.broker_epoch}",
            ) from None
        return self.broker_epoch

    def _lagged(self, lag_s: float, stopped_s: float) -> None:
        assert self._controller is not None
        self._controller.record_stall(lag_s, stopped_s, self._metadata.controller_epoch)

    def _registered(self, session: ZooKeeperSession, broker_epoch: int) -> None:
        assert self._leadership is not None
        self._logs.registered(broker_epoch)  # before any order of this epoch is carried out
        self._registered_again.set()
        self._leadership.attach(session)

    def _log_directory_failed(self, failed: LogManager) -> None:
        """Give up the replicas of a failed directory at once; the controller decides about their leaders."""
        if self._replicas is not None:
            self._replicas.lifecycle.log_dir_failed()
        reason = f"{failed.log_dir}: {failed.directory.failure}"
        if not self._logs.online:
            self._why_it_ends = reason
            last = "" if len(self._logs.paths) == 1 else ", the last one that was online,"
            why = failed.directory.failure
            mend = "free space there or move replicas away" if says_full_disk(str(why)) else "repair the disk"
            self._supervisor.fail(
                MinibrokerError(f"the log directory {failed.log_dir}{last} has failed: {why}; {mend}, then restart")
            )
        elif not self._supervisor.failure.done():  # otherwise the broker is stopping
            self._supervisor.start(self._tell_of_failure(reason), f"notification that {failed.log_dir} has failed")

    async def _tell_of_failure(self, reason: str) -> None:
        """Notify the controller, once the failure is recorded on the other disks (Kafka's propagateLogDirEvent)."""
        await self._logs.note_failed()
        await tell_of_lost_replicas(self._session, self.config.broker_id, reason)


def network_settings(config: BrokerConfig) -> NetworkSettings:
    return NetworkSettings(
        num_network_threads=config.num_network_threads,
        num_io_threads=config.num_io_threads,
        queued_max_requests=config.queued_max_requests,
        socket_request_max_bytes=config.socket_request_max_bytes,
        max_connections=config.max_connections,
        max_connections_per_ip=config.max_connections_per_ip,
        max_connection_creation_rate=config.max_connection_creation_rate,
        max_connections_of_listeners=listener_limits(config, MAX_CONNECTIONS),
        max_connection_creation_rate_of_listeners=listener_limits(config, CREATION_RATE),
        max_connections_per_ip_overrides=host_limits(config),
        protected_listener=config.inter_broker_listener if len(config.security_protocols()) > 2 else None,
        connections_max_idle_ms=config.connections_max_idle_ms,
    )
