"""Kafka's console tools, one after the other; `programs` describes the output."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from confluent_kafka import KafkaException, Producer

ADMIN = "org.apache.kafka.tools"
WAIT_S = 20


def main() -> None:
    end = sys.argv.index("--")
    java, (bootstrap, _, topic) = sys.argv[1:end], sys.argv[end + 1 :]
    topic = topic.removeprefix("topic=")
    group = f"{topic}-group"

    def run(tool: str, *arguments: str, lines: str = "") -> str:
        command = [*java, f"{ADMIN}.{tool}", "--bootstrap-server", bootstrap, *arguments]
        done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise AssertionError(f"it ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-400:]}")
        return done.stdout

    def step(name: str, expected: str, body: Callable[[], str]) -> None:
        try:
            found = body()
            assert expected in found, f"no {expected!r} in {found!r}"
        except (AssertionError, subprocess.TimeoutExpired) as error:
            tell("bad", name, error)
        else:
            tell("ok", name)

    of_topic = ("--topic", topic)
    keyed = ("--property", "parse.key=true", "--property", "key.separator=:")
    read = ("--from-beginning", "--max-messages", "2", "--property", "print.key=true", "--group", group)
    shape = ("--create", *of_topic, "--partitions", "3", "--replication-factor", "3")
    step("topics --create", f"Created topic {topic}.", lambda: run("TopicCommand", *shape))
    step("topics --describe", "ReplicationFactor: 3", lambda: run("TopicCommand", "--describe", *of_topic))
    step("topics --alter", "", lambda: run("TopicCommand", "--alter", *of_topic, "--partitions", "4"))
    step("topics --list", topic, lambda: run("TopicCommand", "--list"))
    step("console-producer", "", lambda: run("ConsoleProducer", *of_topic, *keyed, lines="k1:v1\nk2:v2\n"))
    step("console-consumer", "k1\tv1", lambda: run("consumer.ConsoleConsumer", *of_topic, *read))
    step("get-offsets", f"{topic}:0:", lambda: run("GetOffsetShell", *of_topic))
    step("consumer-groups --list", group, lambda: run("consumer.group.ConsumerGroupCommand", "--list"))
    step(
        "consumer-groups --describe",
        topic,
        lambda: run("consumer.group.ConsumerGroupCommand", "--describe", "--group", group),
    )
    reset = ("--reset-offsets", "--to-earliest", "--execute", "--group", group, *of_topic)
    step("consumer-groups --reset-offsets", topic, lambda: run("consumer.group.ConsumerGroupCommand", *reset))
    step(
        "consumer-groups --delete",
        "successful",
        lambda: run("consumer.group.ConsumerGroupCommand", "--delete", "--group", group),
    )
    try_transactions(bootstrap, topic, run, step)
    step("broker-api-versions", "Produce(0): 0 to 12", lambda: run("BrokerApiVersionsCommand"))
    step("log-dirs", topic, lambda: run("LogDirsCommand", "--describe", "--topic-list", topic))
    try_files(topic, run, step)
    step("topics --delete", "", lambda: run("TopicCommand", "--delete", *of_topic))
    tell("end")


def try_files(topic: str, run: Callable[..., str], step: Callable[[str, str, Callable[[], str]], None]) -> None:
    """Move a partition, elect its preferred leader and delete its records, as files say."""
    reassign = "reassign.ReassignPartitionsCommand"
    partition = {"topic": topic, "partition": 0}
    with tempfile.TemporaryDirectory() as directory:

        def file(name: str, value: object) -> str:
            path = Path(directory, name)
            path.write_text(json.dumps(value))
            return str(path)

        replicas = [
            int(each)
            for each in run("TopicCommand", "--describe", "--topic", topic).split("Replicas: ")[1].split()[0].split(",")
        ]
        plan = file("plan", {"version": 1, "partitions": [partition | {"replicas": replicas[::-1]}]})
        offsets = file("offsets", {"version": 1, "partitions": [partition | {"offset": -1}]})
        step(
            "reassign-partitions --execute",
            "Successfully started",
            lambda: run(reassign, "--reassignment-json-file", plan, "--execute", "--throttle", "1000000"),
        )
        step("reassign-partitions --list", "", lambda: run(reassign, "--list"))
        step(
            "reassign-partitions --verify",
            f"{topic}-0 is completed",
            lambda: run(reassign, "--reassignment-json-file", plan, "--verify"),
        )
        elect = ("--election-type", "preferred", "--topic", topic, "--partition", "0")
        step("leader-election", f"{topic}-0", lambda: run("LeaderElectionCommand", *elect))
        step("delete-records", "low_watermark: ", lambda: run("DeleteRecordsCommand", "--offset-json-file", offsets))


def try_transactions(
    bootstrap: str, topic: str, run: Callable[..., str], step: Callable[[str, str, Callable[[], str]], None]
) -> None:
    """Look at an open transaction, end it in the log, and fence its producer."""
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": topic, "log_level": 2})
    producer.init_transactions(WAIT_S)
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    producer.flush(WAIT_S)
    of_partition = ("--topic", topic, "--partition", "0")

    def open_at() -> str:
        [line] = [
            each.split()
            for each in run("TransactionsCommand", "describe-producers", *of_partition).splitlines()[1:]
            if each.split()[-1] != "None"
        ]
        return line[-1]

    def abort() -> str:
        run("TransactionsCommand", "abort", *of_partition, "--start-offset", open_at())
        return run("TransactionsCommand", "describe-producers", *of_partition)

    def fence() -> str:
        run("TransactionsCommand", "forceTerminateTransaction", "--transactionalId", topic)
        try:
            producer.commit_transaction(WAIT_S)
        except KafkaException as error:
            return str(error.args[0].name())
        return "it was committed"

    described = ("describe", "--transactional-id", topic)
    hanging = ("find-hanging", "--topic", topic)
    step("transactions list", topic, lambda: run("TransactionsCommand", "list"))
    step("transactions describe", "Ongoing", lambda: run("TransactionsCommand", *described))
    step("transactions find-hanging", "StartOffset", lambda: run("TransactionsCommand", *hanging))
    step("transactions abort", "None", abort)
    step("transactions forceTerminateTransaction", "_FENCED", fence)


def tell(*cells: object) -> None:
    print(*(str(cell).replace("\t", " ").replace("\n", " ") for cell in cells), sep="\t", flush=True)


if __name__ == "__main__":
    main()
