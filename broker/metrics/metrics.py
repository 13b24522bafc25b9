"""Exports a broker's metrics to Prometheus: Kafka's metrics, by the names that Prometheus users know.

The problem. Metrics must cost the hot path next to nothing, and a scrape must not block the loop: the library takes 30
ms to format a thousand partitions with a few values each.

The choice. The broker's parts count in plain attributes (`ApiMetrics`, `Traffic`, ...). A scrape reads them, turns them
into prometheus_client's metric families, at most PART_SAMPLES samples at a time, has the library format each part, and
sleeps whenever its slice is over. The values of one scrape are therefore not all of the same moment; neither are those
of several brokers.

Names. Kafka's `kafka.server:type=ReplicaManager,name=LeaderCount` is `kafka_server_replicamanager_leadercount`. A rate
(`IsrShrinksPerSec`) is a counter (`..._isrshrinks_total`); `rate()` computes the value that Kafka shows. A time is a
sum in milliseconds and a count (`..._timems_sum`, `..._timems_count`): the quotient of their rates is the mean. The
times of requests (`TotalTimeMs`) are histograms, from which `histogram_quantile()` computes Kafka's percentiles. There
is no sum over all topics beside the values by topic, because `sum()` would count it twice. Metrics that Kafka lacks
begin with `minibroker_`.

Rejected: prometheus_client's own Counter and Histogram objects, updated by requests (a lock and a dictionary look-up
each); formatting in a thread (it races with the loop, and takes the interpreter lock from it for 5 ms at a time).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from minibroker.broker.groups.coordination import GroupCoordination
from minibroker.broker.metrics.connections import connection_metrics
from minibroker.broker.metrics.disk_times import DiskTimes, disk_metrics
from minibroker.broker.metrics.groups import committed_offsets, group_metrics
from minibroker.broker.metrics.loop_lag import LoopLag
from minibroker.broker.metrics.transactions import coordinator_metrics, leader_metrics
from minibroker.broker.metrics.zookeeper import zookeeper_metrics
from minibroker.broker.network.metrics import ApiMetrics, Times
from minibroker.broker.network.server import SocketServer
from minibroker.broker.quotas.throttling import ClientQuotaManager
from minibroker.broker.replication.manager import ReplicaManager
from minibroker.broker.replication.transcoding import Transcoder
from minibroker.broker.scheduling.purgatory import Purgatory
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.broker.transactions.coordination import TransactionCoordination
from minibroker.broker.transactions.verification import TransactionVerifier
from minibroker.protocol.apis import PRODUCE, Plane
from minibroker.protocol.errors import ErrorCode, error_of
from minibroker.protocol.model import ZooKeeperContact
from minibroker.protocol.recovery_progress import METRICS as RECOVERY_METRICS

PART_SAMPLES = 100
"""Samples formatted in one go, which takes half a millisecond."""
SLICE_S = 0.001
PAUSE_S = 0.001


# --- The controller's measurements (only the composition root imports the controller) -----------------------------


class ClusterPicture(Protocol):
    @property
    def live_brokers(self) -> Sized: ...
    @property
    def topic_ids(self) -> Sized: ...
    @property
    def assignments(self) -> Sized: ...
    @property
    def topics_to_delete(self) -> Sized: ...
    @property
    def ineligible_topics(self) -> Sized: ...
    def offline_partition_count(self) -> int: ...
    def preferred_replica_imbalance_count(self) -> int: ...


class MeasuredTimes(Protocol):
    @property
    def count(self) -> int: ...
    @property
    def total_s(self) -> float: ...
    @property
    def queued_s(self) -> float: ...


class MeasuredController(Protocol):
    @property
    def state(self) -> ClusterPicture | None:
        """None if this controller is not in office."""
        ...

    @property
    def queued_events(self) -> int: ...

    @property
    def event_times(self) -> Mapping[str, MeasuredTimes]:
        """The times of each event, by its name."""
        ...

    @property
    def unclean_elections(self) -> int: ...


CONTROLLER_STATES = {
    "Startup": "controllerchange",
    "Resignation": "controllerchange",
    "BrokerChange": "leaderelection",
    "TopicChange": "topicchange",
    "PartitionModifications": "topicchange",
    "CreateTopicsRequest": "topicchange",
    "CreatePartitionsRequest": "topicchange",
    "DeleteTopics": "topicdeletion",
    "DeleteTopicsRequest": "topicdeletion",
    "ResumeDeletions": "topicdeletion",
    "StopReplicaAnswered": "topicdeletion",
    "TopicDeletionsHeard": "topicdeletion",
    "IsrChange": "isrchange",
    "LogDirFailure": "logdirchange",
    "UncleanLeaderElectionEnable": "uncleanleaderelectionenable",
    "LeaderAndIsrAnswered": "leaderandisrresponsereceived",
    "UpdateMetadataAnswered": "updatemetadataresponsereceived",
    "BrokerSuspected": "brokersuspected",
    "SessionReconnected": "sessionreconnected",
    "Deposed": "controllershutdown",
    "SenderBroke": "controllershutdown",
    "AutoLeaderRebalance": "autoleaderbalance",
    "PreferredReplicaElection": "manualleaderbalance",
    "ElectLeadersRequest": "manualleaderbalance",
    "UnreadableStateChange": "leaderelection",
    "ClusterFormed": "topicchange",
    "PartitionReassignment": "partitionreassignment",
    "ReassignedPartitionsIsrChange": "partitionreassignment",
    "ResumeReassignments": "partitionreassignment",
    "AlterPartitionReassignments": "partitionreassignment",
    "ListPartitionReassignments": "listpartitionreassignment",
    "ControlledShutdownRequest": "controlledshutdown",
}
"""Maps each event to Kafka's ControllerState in which it is handled, or to a name in Kafka's style if there is none.
The time in BrokerChange is Kafka's LeaderElectionRateAndTimeMs."""


# --- The families --------------------------------------------------------------------------------------------------


class _Field(NamedTuple):
    """A metric that each of several objects has."""

    name: str
    documentation: str
    value: Callable[[Any], float]


REQUEST_TIMES: tuple[tuple[str, str, Callable[[ApiMetrics], tuple[list[int], float]]], ...] = (
    (
        "totaltimems",
        "Milliseconds from a request's last byte to the writing of its answer; the buckets end with the answer",
        lambda api: (api.total.counts, api.total.sum_s + api.send_s),
    ),
    (
        "requestqueuetimems",
        "Milliseconds in the request queue",
        lambda api: (api.request_queue.counts, api.request_queue.sum_s),
    ),
    ("localtimems", "Milliseconds in the handler", lambda api: (api.local.counts, api.local.sum_s)),
    (
        "remotetimems",
        "Milliseconds of waiting after the handler had returned, for followers or for data",
        lambda api: (api.remote.counts_of(api.answered), api.remote.sum_s),
    ),
)
REQUEST_BOUNDS_MS = (*(f"{bound_s * 1_000:g}" for bound_s in Times.BOUNDS_S), "+Inf")

REQUEST_COUNTERS = (
    _Field("requests", "Requests answered", lambda api: api.answered),
    _Field("requestbytes", "Bytes of the requests handled", lambda api: api.request_bytes),
)

UNAUTHORIZED = _Field(
    "requests_unauthorized",
    "Requests refused because only brokers may send them, and the sender has not proved that it is that broker",
    lambda api: api.unauthorized,
)

PLANE_GAUGES = (
    _Field(
        "network_requestchannel_requestqueuesize", "Requests that wait for a handler", lambda plane: len(plane.channel)
    ),
    _Field(
        "network_requestchannel_requestqueuebytes",
        "Bytes of requests that wait for a handler or are in one",
        lambda plane: plane.channel.bytes,
    ),
    _Field(
        "network_requestchannel_connectionswaiting",
        "Connections not read from because the request queue is full",
        lambda plane: plane.channel.in_line,
    ),
    _Field(
        "server_kafkarequesthandlerpool_requesthandleravgidlepercent",
        "The fraction of its time since the start, 0 to 1, for which the average request handler was idle",
        lambda plane: plane.pool.idle_ratio(),
    ),
    _Field("server_kafkarequesthandlerpool_size", "Request handlers", lambda plane: plane.pool.size),
)
HANDLER_BUSY = _Field(
    "server_kafkarequesthandlerpool_busy_seconds",
    "Seconds that all request handlers together have spent in requests",
    lambda plane: plane.pool.busy_s,
)

TRAFFIC_COUNTERS = (
    _Field("bytesin", "Bytes of batches appended for producers", lambda traffic: traffic.bytes_in),
    _Field("messagesin", "Records appended for producers", lambda traffic: traffic.messages_in),
    _Field("bytesout", "Bytes of batches fetched by consumers", lambda traffic: traffic.bytes_out),
    _Field("replicationbytesin", "Bytes of batches fetched from leaders", lambda traffic: traffic.replication_bytes_in),
    _Field(
        "replicationbytesout", "Bytes of batches fetched by followers", lambda traffic: traffic.replication_bytes_out
    ),
)

TRANSCODING_COUNTERS = (
    _Field("records", "Records converted, excluding those from the cache", lambda stats: stats.records),
    _Field("bytes", "Bytes of the converted batches", lambda stats: stats.bytes),
    _Field("seconds", "Seconds spent on converting them", lambda stats: stats.seconds),
)
LOG_GAUGES = (
    _Field("size", "Bytes of the log's batches", lambda log: log.size),
    _Field("logstartoffset", "The first offset", lambda log: log.log_start_offset),
    _Field("logendoffset", "The offset of the next record", lambda log: log.log_end_offset),
)

RECOVERY_DOCUMENTATION = {
    "logs": "Logs found when the broker started",
    "remaining_logs": "Logs of these that are not open yet",
    "remaining_segments": "Segments that must still be read before their logs open",
    "bytes": "Bytes of all segments that had to be read when the broker started",
    "remaining_bytes": "Bytes of these that have not been read yet",
}
"""Help texts by field of RecoveryProgress."""

LED_PARTITION_GAUGES = (
    _Field("replicascount", "Replicas assigned, of partitions led here", lambda partition: len(partition.assignment)),
    _Field("insyncreplicascount", "Replicas in sync, of partitions led here", lambda partition: len(partition.isr)),
    _Field(
        "laststableoffsetlag",
        "Records below the high watermark that read_committed consumers wait for, of partitions led here",
        lambda partition: partition.high_watermark - partition.last_stable_offset,
    ),
)
HIGH_WATERMARK = _Field(
    "high_watermark",
    "The offset up to which consumers can read, of partitions led here",
    lambda led: led.high_watermark,
)


class BrokerMetrics(Collector):
    """Reads the counters of a broker's parts. Use it on the event loop only, as they are."""

    def __init__(
        self,
        server: SocketServer,
        replicas: ReplicaManager,
        groups: GroupCoordination,
        transactions: TransactionCoordination,
        verifier: TransactionVerifier,
        logs: LogDirs,
        purgatories: Sequence[Purgatory[Any]],
        controller: MeasuredController,
        loop_lag: LoopLag,
        transcoder: Transcoder,
        client_quotas: ClientQuotaManager,
        zookeeper_contact: Callable[[], ZooKeeperContact],
        disk_times: DiskTimes,
    ) -> None:
        self._disk_times = disk_times
        self._zookeeper_contact = zookeeper_contact
        self._server = server
        self._client_quotas = client_quotas
        self._replicas = replicas
        self._groups = groups
        self._transactions = transactions
        self._verifier = verifier
        self._logs = logs
        self._purgatories = purgatories
        self._controller = controller
        self._loop_lag = loop_lag
        self._transcoder = transcoder

    def collect(self) -> Iterator[Metric]:
        """Return every family, in parts. Consecutive parts of the same name are one family."""
        yield from self._of_the_network()
        yield from self._of_replication()
        yield from group_metrics(self._groups)
        yield from committed_offsets(self._groups.terms.loaded())
        yield from coordinator_metrics(self._transactions)
        yield from leader_metrics(self._replicas, self._verifier, self._transactions.late_since_ms())
        yield from self._of_the_controller()
        yield from zookeeper_metrics(self._zookeeper_contact())
        yield from self._of_the_loop()
        yield from self._of_transcoding()
        yield from self._of_the_logs()
        yield from disk_metrics(self._disk_times)
        yield from recovery_metrics(self._logs)

    def _of_the_network(self) -> Iterator[Metric]:
        server = self._server
        counts = server.metrics
        apis = [([api.name], api) for api in counts.per_api.values()]
        for field in REQUEST_COUNTERS:
            yield from _counters("kafka_network_requestmetrics_", field, ["request"], apis)
        yield error_metrics(counts.per_api.values(), self._replicas.appender.refusals)
        yield from _counters("minibroker_network_", UNAUTHORIZED, ["request"], apis)
        for name, documentation, times in REQUEST_TIMES:
            histogram = HistogramMetricFamily(f"kafka_network_requestmetrics_{name}", documentation, labels=["request"])
            for labels, api in apis:
                by_bound, sum_s = times(api)
                buckets = list(zip(REQUEST_BOUNDS_MS, accumulate(by_bound), strict=True))
                # Most APIs have no requests: their buckets would be most of the page.
                histogram.add_metric(labels, buckets if buckets[-1][1] else buckets[-1:], sum_s * 1_000)
            yield histogram
        sending = SummaryMetricFamily(
            "kafka_network_requestmetrics_responsesendtimems",
            "Milliseconds from an answer until it was written to the socket",
            labels=["request"],
        )
        for labels, api in apis:
            sending.add_metric(labels, api.answered, api.send_s * 1_000)
        yield sending
        planes = [([plane.value], server.planes[plane]) for plane in Plane]
        for field in PLANE_GAUGES:
            yield from _gauges("kafka_", field, ["plane"], planes)
        yield from _counters("kafka_", HANDLER_BUSY, ["plane"], planes)
        software = GaugeMetricFamily(
            "kafka_server_socket_server_metrics_connections",
            "Open connections of clients that report their software (KIP-511)",
            labels=["clientsoftwarename", "clientsoftwareversion"],
        )
        for names, connections in sorted(counts.client_software.connections.items()):
            software.add_metric(names, connections)
        yield software
        yield from connection_metrics(server)
        totals: tuple[tuple[str, str, float], ...] = (
            ("connections_opened", "Connections accepted", counts.connections_opened),
            ("connections_refused", "Connections refused over a limit", counts.connections_refused),
            ("handshakes_failed", "Connections whose TLS handshake failed", counts.handshakes_failed),
            ("connections_closed_for_bad_input", "Connections closed because of invalid input", counts.bad_input),
            ("connections_closed_idle", "Connections closed because they were idle", counts.idle_closed),
            ("connections_closed_slow", "Connections closed because their peer was too slow", counts.slow_closed),
        )
        for name, documentation, total in totals:
            yield CounterMetricFamily(f"minibroker_network_{name}", documentation, total)
        for name, documentation, count in (
            ("successful_authentication", "Clients that authenticated themselves", counts.successful_authentications),
            ("failed_authentication", "Clients that did not authenticate themselves", counts.failed_authentications),
            (
                "successful_reauthentication",
                "Clients that authenticated themselves again",
                counts.successful_reauthentications,
            ),
            (
                "failed_reauthentication",
                "Clients that failed to authenticate themselves again",
                counts.failed_reauthentications,
            ),
            (
                "expired_connections_killed",
                "Connections closed because their client had not authenticated itself again in time",
                counts.expired_connections_killed,
            ),
        ):
            yield CounterMetricFamily(f"kafka_server_socket_server_metrics_{name}", documentation, count)
        throttled = CounterMetricFamily(
            "minibroker_quotas_throttle_seconds", "Throttle times of clients over a quota, summed up", labels=["quota"]
        )
        for key, seconds in self._client_quotas.throttled_s.items():
            throttled.add_metric([key.value], seconds)
        yield throttled

    def _of_replication(self) -> Iterator[Metric]:
        replicas = self._replicas
        partitions = list(replicas.partitions.values())
        led = [partition for partition in partitions if partition.is_leader]
        for name, documentation, value in (
            ("partitioncount", "Partitions with a replica here", len(partitions)),
            ("leadercount", "Partitions led here", len(led)),
            (
                "underreplicatedpartitions",
                "Partitions led here with fewer replicas in sync than assigned",
                sum(len(partition.isr) < partition.replication_factor for partition in led),
            ),
            (
                "underminisrpartitioncount",
                "Partitions led here with fewer replicas in sync than min.insync.replicas",
                sum(len(partition.isr) < partition.min_insync_replicas for partition in led),
            ),
            (
                "atminisrpartitioncount",
                "Partitions led here with exactly min.insync.replicas in sync",
                sum(len(partition.isr) == partition.min_insync_replicas for partition in led),
            ),
            (
                "offlinereplicacount",
                "Replicas that are damaged, or whose log directory is offline",
                self._logs.offline_replica_count,
            ),
        ):
            yield GaugeMetricFamily(f"kafka_server_replicamanager_{name}", documentation, value)
        yield GaugeMetricFamily(
            "kafka_server_replicafetchermanager_maxlag",
            "The most committed records that a replica here lacked when its leader last answered",
            replicas.fetchers.max_lag(),
        )
        yield GaugeMetricFamily(
            "kafka_log_logcleanermanager_uncleanable_partitions_count",
            "Replicas that are no longer compacted, because their log could not be read",
            replicas.cleaner.uncleanable,
        )
        yield CounterMetricFamily(
            "minibroker_log_compactions", "Passes of the compaction over a log", replicas.cleaner.passes
        )
        yield CounterMetricFamily(
            "minibroker_replicas_healed",
            "Damaged replicas that were deleted and copied from their leader again",
            replicas.healer.healed,
        )
        for name, documentation, count in (
            ("replicamanager_isrshrinks", "Times that a replica left an ISR", replicas.isr_writer.shrinks),
            ("replicamanager_isrexpands", "Times that a replica joined an ISR", replicas.isr_writer.expands),
            ("delayedproducemetrics_expires", "Produce requests timed out", replicas.waits.expired_produces),
            (
                "delayeddeleterecordsmetrics_expires",
                "DeleteRecords requests timed out",
                replicas.waits.expired_deletions,
            ),
            (
                "delayedfetchmetrics_expires",
                "Fetch requests answered at their deadline",
                replicas.waits.expired_fetches,
            ),
        ):
            yield CounterMetricFamily(f"kafka_server_{name}", documentation, count)
        purgatory_size = GaugeMetricFamily(
            "kafka_server_delayedoperationpurgatory_purgatorysize",
            "Operations watched, counted once per key, including completed ones that are not yet purged",
            labels=["delayedoperation"],
        )
        delayed = GaugeMetricFamily(
            "kafka_server_delayedoperationpurgatory_numdelayedoperations",
            "Operations that wait",
            labels=["delayedoperation"],
        )
        for name in dict.fromkeys(purgatory.name for purgatory in self._purgatories):
            namesakes = [purgatory for purgatory in self._purgatories if purgatory.name == name]
            purgatory_size.add_metric([name], sum(purgatory.watched() for purgatory in namesakes))
            delayed.add_metric([name], sum(purgatory.delayed() for purgatory in namesakes))
        yield from (purgatory_size, delayed)
        topics = [([topic], traffic) for topic, traffic in replicas.lifecycle.traffic.items()]
        for field in TRAFFIC_COUNTERS:
            yield from _counters("kafka_server_brokertopicmetrics_", field, ["topic"], topics)
        of_led = [(_labels(partition.log), partition) for partition in led]
        for field in LED_PARTITION_GAUGES:
            yield from _gauges("kafka_cluster_partition_", field, ["topic", "partition"], of_led)
        yield from _gauges("minibroker_partition_", HIGH_WATERMARK, ["topic", "partition"], of_led)

    def _of_the_controller(self) -> Iterator[Metric]:
        controller = self._controller
        state = controller.state
        for name, documentation, value in (
            ("activecontrollercount", "1 if this broker is the controller", int(state is not None)),
            (
                "offlinepartitionscount",
                "Partitions without a live leader (0, like the following ones, if this broker is not the controller)",
                0 if state is None else state.offline_partition_count(),
            ),
            (
                "preferredreplicaimbalancecount",
                "Partitions not led by their preferred leader, the first of their replicas",
                0 if state is None else state.preferred_replica_imbalance_count(),
            ),
            ("activebrokercount", "Live brokers", 0 if state is None else len(state.live_brokers)),
            ("globaltopiccount", "Topics", 0 if state is None else len(state.topic_ids)),
            ("globalpartitioncount", "Partitions", 0 if state is None else len(state.assignments)),
            ("topicstodeletecount", "Topics to be deleted", 0 if state is None else len(state.topics_to_delete)),
            (
                "topicsineligibletodeletecount",
                "Topics whose deletion waits",
                0 if state is None else len(state.ineligible_topics),
            ),
        ):
            yield GaugeMetricFamily(f"kafka_controller_kafkacontroller_{name}", documentation, value)
        yield GaugeMetricFamily(
            "kafka_controller_controllereventmanager_eventqueuesize",
            "Events that wait for the controller",
            controller.queued_events,
        )
        yield CounterMetricFamily(
            "kafka_controller_controllerstats_uncleanleaderelections",
            "Leaders elected that may lack acknowledged records: by the topic's setting, or for the longest log if no "
            "replica's log can be trusted",
            controller.unclean_elections,
        )
        times = controller.event_times
        yield SummaryMetricFamily(
            "kafka_controller_controllereventmanager_eventqueuetimems",
            "Milliseconds for which the controller's events have waited",
            sum(of_event.count for of_event in times.values()),
            sum(of_event.queued_s for of_event in times.values()) * 1_000,
        )
        for controller_state in dict.fromkeys(CONTROLLER_STATES.values()):
            of_state = [of for event, of in times.items() if CONTROLLER_STATES.get(event) == controller_state]
            yield SummaryMetricFamily(
                f"kafka_controller_controllerstats_{controller_state}rateandtimems",
                "Milliseconds that the controller has spent in this state, and the number of times",
                sum(of_event.count for of_event in of_state),
                sum(of_event.total_s for of_event in of_state) * 1_000,
            )

    def _of_the_loop(self) -> Iterator[Metric]:
        lag = self._loop_lag
        bounds = [*(str(bound) for bound in lag.BOUNDS_S), "+Inf"]
        yield HistogramMetricFamily(
            "minibroker_eventloop_lag_seconds",
            "The lateness of the event loop's timers, measured ten times a second",
            buckets=list(zip(bounds, accumulate(lag.counts), strict=True)),
            sum_value=lag.sum_s,
        )
        yield GaugeMetricFamily(
            "minibroker_eventloop_lag_max_seconds", "The largest lag of the last one to two minutes", lag.max_s
        )

    def _of_transcoding(self) -> Iterator[Metric]:
        transcoder = self._transcoder
        rows = [(["Fetch"], transcoder.fetched), (["Produce"], transcoder.produced)]
        for field in TRANSCODING_COUNTERS:
            yield from _counters("minibroker_transcoding_", field, ["request"], rows)
        for name, documentation, value in (
            ("hits", "Batches already transcoded for an earlier fetch", transcoder.cache_hits),
            ("misses", "Batches that had to be transcoded for a fetch", transcoder.cache_misses),
        ):
            yield CounterMetricFamily(f"minibroker_transcoding_cache_{name}", documentation, value)
        yield GaugeMetricFamily(
            "minibroker_transcoding_cache_bytes", "Bytes of the cached transcoded batches", transcoder.cached_bytes
        )

    def _of_the_logs(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "minibroker_log_longest_flush_seconds",
            "Duration of the longest flush of a log that is in progress",
            max((log.flushing_for_s for log in self._logs.logs()), default=0.0),
        )
        yield GaugeMetricFamily(
            "kafka_log_logmanager_offlinelogdirectorycount",
            "Log directories that could not be opened or have failed",
            len(self._logs.offline),
        )
        logs = [(_labels(log), log) for log in self._logs.logs()]
        for field in LOG_GAUGES:
            yield from _gauges("kafka_log_log_", field, ["topic", "partition"], logs)


def recovery_metrics(logs: LogDirs) -> Iterator[Metric]:
    """Return the metrics that exist while the logs are being opened."""
    progress = logs.recovery
    for field, name in RECOVERY_METRICS.items():
        family = GaugeMetricFamily(name, RECOVERY_DOCUMENTATION[field], labels=["dir"])
        for path, of_directory in progress.items():
            family.add_metric([path], getattr(of_directory, field))
        yield family


Rows = Sequence[tuple[list[str], Any]]
"""Label values, and the measured object."""


def _labels(log: Log) -> list[str]:
    return [log.partition.topic, str(log.partition.partition)]


def error_metrics(apis: Iterable[ApiMetrics], refusals: Mapping[int, int]) -> Metric:
    """Return Kafka's ErrorsPerSec of requests whose handler failed, and of refused batches, by error."""
    counts = {(api.name, ErrorCode.UNKNOWN_SERVER_ERROR.name): api.errors for api in apis}
    for code, count in refusals.items():
        labels = PRODUCE.name, error_of(code).name
        counts[labels] = counts.get(labels, 0) + count
    family = CounterMetricFamily(
        "kafka_network_requestmetrics_errors",
        "Requests whose handler failed (UNKNOWN_SERVER_ERROR), and batches of producers that were refused",
        labels=["request", "error"],
    )
    for labels, count in counts.items():
        family.add_metric(labels, count)
    return family


def _counters(prefix: str, field: _Field, labels: Sequence[str], rows: Rows) -> Iterator[Metric]:
    for part in _in_parts(rows):
        family = CounterMetricFamily(prefix + field.name, field.documentation, labels=labels)
        for values, measured in part:
            family.add_metric(values, field.value(measured))
        yield family


def _gauges(prefix: str, field: _Field, labels: Sequence[str], rows: Rows) -> Iterator[Metric]:
    for part in _in_parts(rows):
        family = GaugeMetricFamily(prefix + field.name, field.documentation, labels=labels)
        for values, measured in part:
            family.add_metric(values, field.value(measured))
        yield family


def _in_parts(rows: Rows) -> Iterator[Rows]:
    return (rows[start : start + PART_SAMPLES] for start in range(0, len(rows), PART_SAMPLES))


# --- The text ------------------------------------------------------------------------------------------------------


class _One(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


async def exposition(parts: Iterable[Metric], clock: Callable[[], float]) -> bytes:
    """Return the metrics in Prometheus's text format, version 0.0.4. `clock` is in seconds.

    Parts are taken one at a time, and the loop runs between them as soon as SLICE_S have passed.
    """
    pieces: list[bytes] = []
    name = ""
    slice_ends_at = clock() + SLICE_S
    for part in parts:
        text = generate_latest(_One(part))
        if part.name == name:
            text = text.split(b"\n", 2)[2]  # without the HELP and TYPE lines, which precede the first part
        name = part.name
        pieces.append(text)
        if clock() >= slice_ends_at:
            await asyncio.sleep(PAUSE_S)
            slice_ends_at = clock() + SLICE_S
    return b"".join(pieces)
