"""The output of the programs in Python; `programs` describes it."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

from tests.kafka_clients.records import NULL, with_key


def arguments_of(argv: list[str]) -> tuple[str, str, dict[str, str]]:
    """Log warnings to the standard error, because these clients show some errors only there."""
    logging.basicConfig(level=logging.WARNING)
    _, bootstrap, verb, *rest = argv
    return bootstrap, verb, dict(each.split("=", 1) for each in rest)


def tell(*cells: object) -> None:
    print(*(str(cell).replace("\t", " ").replace("\n", " ") for cell in cells), sep="\t", flush=True)


def content(text: str) -> bytes | None:
    return None if text == NULL else text.encode()


def text_of(data: bytes | None) -> str:
    return NULL if data is None else data.decode()


def record_of(number: int, arguments: dict[str, str]) -> dict[str, Any]:
    """The arguments of `send` for the record."""
    key, value, headers = with_key(number)
    pairs = (each.split("=", 1) for each in headers.split(","))
    return {
        "key": content(key),
        "value": content(value),
        "partition": number % int(arguments["partitions"]),
        "timestamp_ms": int(arguments["base"]) + number,
        "headers": [(name, content(value)) for name, value in pairs],
    }


def tell_record(record: Any) -> None:
    headers = ",".join(f"{name}={text_of(value)}" for name, value in record.headers)
    key, value = text_of(record.key), text_of(record.value)
    tell("rec", record.partition, record.offset, record.timestamp, key, value, headers)


def stopped_by_stdin() -> threading.Event:
    """Set by a line, or by the end, of the standard input."""
    stopped = threading.Event()

    def wait() -> None:
        sys.stdin.readline()
        stopped.set()

    threading.Thread(target=wait, daemon=True).start()
    return stopped
