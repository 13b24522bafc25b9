"""Kafka's console tools, one after the other; `programs` describes the output."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

ADMIN = "org.apache.kafka.tools"


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
    step("broker-api-versions", "Produce(0): 0 to 11", lambda: run("BrokerApiVersionsCommand"))
    step("log-dirs", topic, lambda: run("LogDirsCommand", "--describe", "--topic-list", topic))
    step("topics --delete", "", lambda: run("TopicCommand", "--delete", *of_topic))
    tell("end")


def tell(*cells: object) -> None:
    print(*(str(cell).replace("\t", " ").replace("\n", " ") for cell in cells), sep="\t", flush=True)


if __name__ == "__main__":
    main()
