"""A worker of Kafka Connect that copies a file into a topic, exactly once, and the topic into another file; `programs`
describes the output."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from minibroker.deploy.local.ports import free_ports
from tests.waiting import until_true

LINES = 2_000
WAIT_S = 60.0
FILES = "org.apache.kafka.connect.file.FileStream"


def main() -> None:
    end = sys.argv.index("--")
    java, (bootstrap, _, topic) = sys.argv[1:end], sys.argv[end + 1 :]
    topic = topic.removeprefix("topic=")
    [port] = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="minibroker-connect-") as temporary:
        directory = Path(temporary)
        settings = directory / "worker.properties"
        settings.write_text(worker(bootstrap, topic, port))
        source, copy = directory / "source", directory / "copy"
        source.write_text(lines(0))
        of_topic = {"topic.creation.default.replication.factor": 3, "topic.creation.default.partitions": 1}
        once = {"exactly.once.support": "required", "file": str(source), "topic": topic}

        def whole(count: int) -> bool:
            """A sink repeats what it had not committed: a line is once in the topic, and at least once in the copy."""
            sent = "".join(map(lines, range(count)))
            return (
                copy.exists()
                and set(copy.read_text().splitlines()) == set(sent.splitlines())
                and committed(bootstrap, topic) == sent
            )

        with running([*java, str(settings)], directory / "log"):
            step("worker", lambda: answers(port, "") is not None)
            step(
                "source",
                lambda: created(port, "source", {"connector.class": f"{FILES}SourceConnector", **once, **of_topic}),
            )
            sink = {"connector.class": f"{FILES}SinkConnector", "file": str(copy), "topics": topic}
            step("sink", lambda: created(port, "sink", sink))
            step("every line once", lambda: whole(1))
        with source.open("a") as more:
            more.write(lines(1))
        with running([*java, str(settings)], directory / "log"):
            step("every line once, after the worker was killed", lambda: whole(2))
    print("end", flush=True)


def committed(bootstrap: str, topic: str) -> str:
    """Return the lines of the topic's only partition."""
    settings = {"bootstrap.servers": bootstrap, "group.id": topic, "enable.partition.eof": True}
    consumer = Consumer({**settings, "isolation.level": "read_committed"})
    try:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        found = []
        while (message := consumer.poll(WAIT_S)) is not None and message.error() is None:
            found.append((message.value() or b"").decode() + "\n")
        return "".join(found)
    finally:
        consumer.close()


def lines(part: int) -> str:
    return "".join(f"line {number}\n" for number in range(part * LINES, (part + 1) * LINES))


def worker(bootstrap: str, topic: str, port: int) -> str:
    storage = "".join(
        f"{kind}.storage.topic={topic}-{kind}\n{kind}.storage.replication.factor=3\n"
        for kind in ("offset", "config", "status")
    )
    converters = "".join(
        f"{of}.converter=org.apache.kafka.connect.storage.StringConverter\n" for of in ("key", "value")
    )
    return f"""bootstrap.servers={bootstrap}
group.id={topic}-workers
listeners=http://127.0.0.1:{port}
exactly.once.source.support=enabled
offset.flush.interval.ms=500
session.timeout.ms=6000
heartbeat.interval.ms=1000
scheduled.rebalance.max.delay.ms=0
consumer.session.timeout.ms=6000
consumer.heartbeat.interval.ms=1000
{storage}{converters}"""


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[None]:
    """Run a worker, and kill it."""
    with log.open("a") as told:
        process = subprocess.Popen(command, stdout=told, stderr=told)
        try:
            yield
        finally:
            process.kill()
            process.wait()


def answers(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the worker's answer, or None while it is not ready."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", headers={"Content-Type": "application/json"})
    if body is not None:
        request.data = json.dumps(body).encode()
    with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(request) as answer:
        return json.load(answer)
    return None


def created(port: int, name: str, config: dict[str, Any]) -> bool:
    found = answers(port, f"connectors/{name}/status")
    if found is None:
        answers(port, "connectors", {"name": name, "config": {key: str(value) for key, value in config.items()}})
        return False
    return [each["state"] for each in found["tasks"]] == ["RUNNING"]


def step(name: str, is_done: Callable[[], bool]) -> None:
    try:
        until_true(is_done, WAIT_S)
    except TimeoutError as error:
        print("bad", name, error, sep="\t", flush=True)
    else:
        print("ok", name, sep="\t", flush=True)


if __name__ == "__main__":
    main()
