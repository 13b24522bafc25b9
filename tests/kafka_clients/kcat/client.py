"""kcat with the verbs of `programs`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from json import JSONDecoder
from typing import Any

from tests.kafka_clients import settings
from tests.kafka_clients.records import NULL, without_headers

KEY = ":"


def main() -> None:
    bootstrap, verb, *rest = sys.argv[1:]
    file = settings.file()
    kcat = ["kcat", *(["-F", file] if file else []), "-b", bootstrap, "-X", "topic.metadata.refresh.interval.ms=1000"]
    VERBS[verb](kcat, dict(each.split("=", 1) for each in rest))
    tell("end")


def tell(*cells: object) -> None:
    print(*cells, sep="\t", flush=True)


def produce(kcat: list[str], arguments: dict[str, str]) -> None:
    """kcat does not report acknowledgements, but fails if a record was not acknowledged. It chooses the partitions from
    the keys."""
    number, count, per_second = (int(arguments[name]) for name in ("first", "count", "per_second"))
    for codec in arguments["codecs"].split(","):
        command = [
            *kcat,
            "-P",
            "-t",
            arguments["topic"],
            f"-K{KEY}",
            "-Z",
            "-z",
            codec,
            "-X",
            "enable.idempotence=true",
        ]
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            numbers = range(number, number + count)
            for number in numbers:
                key, value, _ = without_headers(number)
                process.stdin.write(f"{key}{KEY}{'' if value == NULL else value}\n")
                process.stdin.flush()
                if per_second:
                    time.sleep(1 / per_second)
            process.stdin.close()
            code = process.wait()
        number += 1
        for each in numbers:
            tell(*(("failed", each, f"kcat ended with {code}") if code else ("ack", each, -1, -1)))


def tell_records(lines: Iterable[str]) -> None:
    for line in lines:
        tell_record(json.loads(line))


def tell_record(record: dict[str, Any]) -> None:
    names = record.get("headers", [])
    headers = ",".join(
        f"{name}={NULL if value is None else value}" for name, value in zip(names[::2], names[1::2], strict=True)
    )
    key, value = (NULL if record[name] is None else record[name] for name in ("key", "payload"))
    tell("rec", record["partition"], record["offset"], record["ts"], key, value, headers)


def consume(kcat: list[str], arguments: dict[str, str]) -> None:
    command = [*kcat, "-C", "-q", "-J", "-u", "-t", arguments["topic"], "-o", "beginning", "-c", arguments["until"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        tell_records(process.stdout)


def seek(kcat: list[str], arguments: dict[str, str]) -> None:
    topic = arguments["topic"]
    command = [*kcat, "-C", "-q", "-J", "-t", topic, "-p", "0", "-o", arguments["offset"], "-c", "1"]
    tell_records(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines())
    for what, time_ms in (("at", arguments["time"]), ("first", "-2"), ("last", "-1")):
        queries = [each for p in range(int(arguments["partitions"])) for each in ("-t", f"{topic}:{p}:{time_ms}")]
        answer = subprocess.run([*kcat, "-Q", *queries], stdout=subprocess.PIPE, text=True, check=True).stdout
        for line in answer.splitlines():
            partition, offset = line.removeprefix(f"{topic} [").split("] offset ")
            tell(what, partition, offset)


def group(kcat: list[str], arguments: dict[str, str]) -> None:
    """Records and rebalances come in order, from one pipe: a record that is read again after a rebalance must not
    overtake the line about it. librdkafka's threads log nothing, because they would write into these lines."""
    command = [*kcat, "-J", "-u", "-X", "auto.offset.reset=earliest", "-X", "auto.commit.interval.ms=100"]
    command += ["-X", f"partition.assignment.strategy={arguments['strategy']}", "-X", "session.timeout.ms=10000"]
    command += ["-X", "heartbeat.interval.ms=500", "-X", "log_level=0", "-G", arguments["group"], arguments["topic"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None

        def stop() -> None:
            sys.stdin.readline()
            process.terminate()

        threading.Thread(target=stop, daemon=True).start()
        for line in process.stdout:
            rest = line
            if line.startswith("{"):  # kcat writes the end of the line by itself
                record, end = JSONDecoder().raw_decode(line)
                tell_record(record)
                rest = line[end:]
            _tell_rebalance(rest, arguments["topic"])


def _tell_rebalance(line: str, topic: str) -> None:
    """Parse lines such as `% Group g rebalanced (memberid m): assigned: t [0], t [1]`, and `... incremental revoke of 1
    partition(s) (memberid m, COOPERATIVE rebalance protocol): t [0]`."""
    head, _, partitions = line.rpartition(": ")
    if not line.startswith("% Group ") or f"{topic} [" not in partitions:
        if line.strip():
            print(line, end="", file=sys.stderr, flush=True)
        return
    what = "assigned" if head.endswith("assigned") or " incremental assignment " in head else "revoked"
    for each in partitions.split(","):
        tell(what, each.strip().removeprefix(f"{topic} [").removesuffix("]"))


VERBS = {"produce": produce, "consume": consume, "seek": seek, "group": group}

if __name__ == "__main__":
    main()
