"""The settings with which the programs reach a secured cluster.

The environment variable CLIENT_SETTINGS names a file with them: properties of Java for Java's client, and those of
librdkafka for all others, as `minibroker client-config` prints them. Without the variable the cluster is open.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

VARIABLE = "CLIENT_SETTINGS"


def file() -> str | None:
    return os.environ.get(VARIABLE)


def of_librdkafka() -> dict[str, Any]:
    path = file()
    return {} if path is None else read(Path(path))


def read(path: Path) -> dict[str, Any]:
    return dict(line.split("=", 1) for line in path.read_text().splitlines())


def of_kafka_python(bootstrap: str) -> dict[str, Any]:
    """The arguments of kafka-python's clients, with `ssl_cafile`."""
    found = of_librdkafka()
    if not found:
        return {"bootstrap_servers": bootstrap.split(",")}
    return {
        "bootstrap_servers": bootstrap.split(","),
        "security_protocol": found["security.protocol"],
        "ssl_cafile": found["ssl.ca.location"],
        "sasl_mechanism": found["sasl.mechanism"],
        "sasl_plain_username": found["sasl.username"],
        "sasl_plain_password": found["sasl.password"],
    }
