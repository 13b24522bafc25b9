"""What a failed test's report says of a cluster, from its files alone."""

from __future__ import annotations

import io
import logging
from pathlib import Path

from minibroker.broker.log_format import LimitedHandler
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry
from minibroker.deploy.testing.evidence import Begin, Fault, told

CLUSTER = ClusterFile(zookeeper=ZooKeeperEntry("127.0.0.1:2181", 2181), brokers=(BrokerEntry(id=1, port=9092),))


def logged(*lines: tuple[int, str]) -> str:
    """Return lines as a broker logs them."""
    stream = io.StringIO()
    handler = LimitedHandler(stream)
    for level, text in lines:
        handler.emit(logging.LogRecord("minibroker.broker", level, __file__, 1, text, None, None))
    return stream.getvalue()


def test_only_warnings_since_the_beginning_are_told(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "broker-1.log"
    log.parent.mkdir()
    log.write_text(logged((logging.WARNING, "long ago")))
    begin = Begin.now(tmp_path)
    with log.open("a") as file:
        file.write(
            logged((logging.INFO, "started"), (logging.WARNING, "the disk is slow"), (logging.ERROR, "it broke"))
        )
    text = told(tmp_path, CLUSTER, (), begin)
    heading, slow, broke = text.splitlines()[-3:]
    assert heading == "the last warnings in broker-1.log:"
    assert slow.endswith("WARNING minibroker.broker: the disk is slow")
    assert broke.endswith("ERROR minibroker.broker: it broke")


def test_faults_are_told_in_order_with_their_members_and_times(tmp_path: Path) -> None:
    begin = Begin(1_000, {})
    faults = [Fault(500, "kill", "1", (1,)), Fault(1_250, "pause", "controller", (1,)), Fault(3_000, "heal", "", ())]
    assert told(tmp_path, CLUSTER, faults, begin).splitlines()[2:] == [
        "what the test did: 2",
        "    00:00:01.250  +250 ms  pause controller (broker 1)",
        "    00:00:03.000  +2,000 ms  heal",
        "failovers: none",
    ]
