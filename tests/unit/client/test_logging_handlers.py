"""Blocking clients within logging handlers. `logging` holds locks during the call, and no client may wait for these."""

from __future__ import annotations

import subprocess
import sys

import pytest

from minibroker.protocol.apis import PRODUCE
from tests.unit.client.scripted_broker import DROP
from tests.unit.client.scripted_thread import scripted_cluster

PROGRAM = '''
import logging, logging.config, sys, threading
from minibroker.sync import Admin, Consumer, Producer

bootstrap, disturbance = sys.argv[1:]

class Handler(logging.Handler):
    """Sends what is logged, and waits for the acknowledgement."""

    producer = None

    def __init__(self):
        super().__init__()
        if disturbance == "lazy":
            return
        with Admin(bootstrap) as admin:
            admin.list_topics()
        with Consumer(bootstrap, group="readers", topics=["orders"], heartbeat_interval_ms=20) as consumer:
            consumer.poll(200)
            consumer.commit()
        self.start()

    def start(self):
        producer = Producer(bootstrap, linger_ms=20, request_timeout_ms=500)
        producer.start()
        producer.send("orders", b"configured").result(5_000)
        self.producer = producer

    def emit(self, record):
        if self.producer is None:
            if disturbance != "lazy":
                return
            self.start()
        self.producer.send("orders", record.getMessage().encode(), on_delivery=broken).result(5_000)

    def close(self):
        if self.producer is not None:
            self.producer.close()
            self.producer = None
        super().close()

def broken(*of_delivery):
    if disturbance == "callback":
        raise ZeroDivisionError("planted")

def configure():
    logging.config.dictConfig({
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {"kafka": {"class": "__main__.Handler"}},
        "root": {"level": "INFO" if disturbance == "callback" else "DEBUG", "handlers": ["kafka"]},
        "loggers": {"minibroker": {"propagate": disturbance != "callback"}},
    })

logging.captureWarnings(True)
configure()
for number in range(5):
    logging.getLogger("app").info("line %d", number)
configure()  # closes the first handler
logging.getLogger("app").info("last")
'''


@pytest.mark.parametrize(
    ("disturbance", "mode"),
    [("nothing", ["-X", "dev"]), ("connections that break", []), ("callback", []), ("lazy", [])],
)
def test_a_handler_that_dict_config_builds_may_use_blocking_clients(disturbance: str, mode: list[str]) -> None:
    with scripted_cluster() as cluster:
        if disturbance == "connections that break":
            cluster.do(lambda: cluster.cluster.script(PRODUCE, DROP, DROP, DROP))
        command = [sys.executable, *mode, "-c", PROGRAM, cluster.bootstrap, disturbance]
        ended = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        values = [value for value in cluster.values() if value and value.startswith((b"line", b"configured", b"last"))]
    lines = [b"line %d" % number for number in range(5)]
    assert [value for value in values if value != b"configured"] == [*lines, b"last"]
