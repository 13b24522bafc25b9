"""The common parts of jobs: their Spark session, running queries to the end, and reporting progress."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minibroker.client.cli.terminal.live import progress_bar
from minibroker.client.security import Security, TokenFile
from minibroker.protocol.errors import MinibrokerError
from minibroker.spark_jobs.session import check_packages, spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from minibroker.spark_jobs.progress import TriggerProgress

DEFAULT_MASTER = "local[*,4]"
"""All cores, and four attempts at each task: with local[*] the death of a Python worker ends the job."""

_OPTION_OF: Mapping[str, str] = {
    "security_protocol": "security.protocol",
    "ssl_cafile": "ssl.truststore.location",
    "ssl_certfile": "ssl.keystore.location",
    "ssl_password": "ssl.key.password",
    "sasl_mechanism": "sasl.mechanism",
    "sasl_plain_username": "sasl.username",
    "sasl_plain_password": "sasl.password",
}
"""The options whose values are arguments of clients."""

_LISTENER_PATIENCE_S = 5.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Source:
    """The topics to read, with the same options for batch and stream."""

    bootstrap: str
    topics: Sequence[str]
    starting: str = "earliest"
    max_offsets_per_trigger: int | None = None
    timestamp_out_of_range: str = "error"
    security: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The source's options for TLS and SASL, by Kafka's names."""

    @property
    def connection(self) -> dict[str, str]:
        return {"bootstrap.servers": self.bootstrap, **self.security}

    @property
    def subscription(self) -> dict[str, str]:
        return self.connection | {
            "subscribe": ",".join(self.topics),
            "includeHeaders": "true",
            "timestampOutOfRange": self.timestamp_out_of_range,
        }

    @property
    def stream_options(self) -> dict[str, str]:
        limit = self.max_offsets_per_trigger
        limits = {} if limit is None else {"maxOffsetsPerTrigger": str(limit)}
        return self.subscription | {"startingOffsets": self.starting} | limits


def security_options(security: Security) -> dict[str, str]:
    """Return the options for settings of connections that were read from a file (`from_kafka_names`).

    Paths are absolute, since tasks run in other directories. A password is an option of its own, never a part of
    `sasl.jaas.config`: Spark's logs and pages hide options whose names have the word.
    """
    given: dict[str, str] = {}
    for argument, value in security.items():
        name = _OPTION_OF.get(argument)
        if name is not None and isinstance(value, str):
            given[name] = os.path.abspath(value) if name.endswith(".location") else value
    if security.get("ssl_check_hostname") is False:
        given["ssl.endpoint.identification.algorithm"] = ""
    provider = security.get("sasl_oauth_token_provider")
    if isinstance(provider, TokenFile):
        given["sasl.oauthbearer.token.endpoint.url"] = provider.url
    return given


@contextmanager
def job_session(name: str, master: str | None, settings: Mapping[str, str]) -> Iterator[SparkSession]:
    """Yield a session for one job, and stop it at the end. Raises MinibrokerError if Spark or Java is missing."""
    check_packages()
    from py4j.protocol import Py4JError, Py4JNetworkError

    session = spark_session(
        f"minibroker {name}", master=master, settings=settings, defaults={"spark.master": DEFAULT_MASTER}
    )
    try:
        prepare_session(session)
        yield session
    except (Py4JNetworkError, ConnectionError) as error:
        raise MinibrokerError(
            f"Spark's Java process of this job has died ({error}): start the job again, and it continues where it was"
        ) from error
    finally:
        with suppress(Py4JError, ConnectionError):  # that process may be gone
            session.stop()


def prepare_session(session: SparkSession) -> None:
    """Override the settings of the session on which results depend."""
    session.sparkContext.setLogLevel("ERROR")
    # All readers of Parquet understand timestamps in microseconds, of any century.
    session.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    session.conf.set("spark.sql.parquet.datetimeRebaseModeInWrite", "CORRECTED")
    if not session.sparkContext.getConf().contains("spark.sql.shuffle.partitions"):
        # Spark's default is 200 tasks and files of state for each batch.
        session.conf.set("spark.sql.shuffle.partitions", str(session.sparkContext.defaultParallelism))


def stop_on_signals() -> threading.Event:
    """Return an event that SIGINT, SIGTERM and SIGHUP set. Call it after the session is created.

    Spark's own handler raises at any point, perhaps during an exchange with its Java process, and also uses that
    connection itself, which is unusable afterwards.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: stop.set())
    return stop


# --- queries -------------------------------------------------------------------------------------------------------


def run_query(
    session: SparkSession, query: StreamingQuery, stop: threading.Event, watch: Callable[[], bool] = lambda: False
) -> None:
    """Wait until the query ends. Stop it if `stop` is set, or if `watch`, called several times a second, returns True.

    Raises MinibrokerError with the reason if it fails.
    """
    try:
        while is_running(query) and not watch() and not stop.wait(_POLL_S):
            pass
        if stop.is_set():
            # Spark logs a thousand lines about an interrupted batch.
            session.sparkContext.setLogLevel("OFF")
    finally:
        stop_query(query)


def is_running(query: StreamingQuery) -> bool:
    """Return False if the query has ended. Raises MinibrokerError with the reason if it failed."""
    if query.isActive:
        return True
    error = query.exception()
    if error is not None:
        raise MinibrokerError(f"the query {query.name} ended: {reason_of(error)}") from error
    return False


def stop_query(query: StreamingQuery) -> None:
    from py4j.protocol import Py4JNetworkError

    with suppress(Py4JNetworkError, ConnectionError):  # the query has died with Spark's Java process
        query.stop()


_PYTHON_ERROR = re.compile(r"^\s*(?:[\w]+\.)*([A-Z]\w+): (\S.*)$", re.MULTILINE)


def reason_of(error: BaseException) -> str:
    """Return the last Python exception that Spark's text quotes, or else the first line of the text."""
    text = str(error)
    if "Traceback (most recent call last)" in text:
        quoted = _PYTHON_ERROR.findall(text.rpartition("Traceback (most recent call last)")[2])
        if quoted:
            return str(quoted[0][1] if quoted[0][0] == "MinibrokerError" else f"{quoted[0][0]}: {quoted[0][1]}")
    return text.strip().splitlines()[0] if text.strip() else repr(error)


# --- progress ------------------------------------------------------------------------------------------------------


def tell(text: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


@contextmanager
def triggers_told(session: SparkSession) -> Iterator[None]:
    """Print a line on stderr for each trigger of a query that reads records: rows, rows per second, lag."""
    from minibroker.spark_jobs.progress import LagListener

    def report(trigger: TriggerProgress) -> None:
        if trigger.rows:
            tell(str(trigger))

    listener = LagListener(report)
    session.streams.addListener(listener)
    try:
        yield
        _settle(listener)
    finally:
        session.streams.removeListener(listener)


def _settle(listener: object) -> None:
    """Wait for late calls of the listener: Spark makes them some time after a query has ended."""
    give_up_at = time.monotonic() + _LISTENER_PATIENCE_S
    latest = getattr(listener, "latest", ())
    seen = -1
    while len(latest) != seen and time.monotonic() < give_up_at:
        seen = len(latest)
        time.sleep(_POLL_S)


def run_batch(session: SparkSession, description: str, stop: threading.Event, action: Callable[[], None]) -> None:
    """Run an action that starts Spark jobs, and show how many of their tasks are done.

    Raises KeyboardInterrupt once `stop` is set and the jobs are cancelled, MinibrokerError if one fails.
    """
    from pyspark.errors import PySparkException

    context = session.sparkContext
    tasks: dict[int, int] = {}
    with ThreadPoolExecutor(1, thread_name_prefix="batch") as threads, progress_bar(description, None) as update:
        running = threads.submit(action)
        while not wait([running], _POLL_S).done:
            if stop.is_set():
                context.cancelAllJobs()
            for stage_id in context.statusTracker().getActiveStageIds():
                stage = context.statusTracker().getStageInfo(stage_id)
                if stage is not None:
                    tasks[stage_id] = stage.numCompletedTasks
            update(sum(tasks.values()))
    if stop.is_set():
        raise KeyboardInterrupt
    try:
        running.result()
    except PySparkException as error:
        raise MinibrokerError(f"{description} failed: {reason_of(error)}") from error
