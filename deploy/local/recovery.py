"""The progress of brokers that recover their logs, read from their metrics, which they serve from the beginning.

Unlike a file, metrics end with the broker.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException

from minibroker.deploy.local.ports import LOOPBACK
from minibroker.protocol.recovery_progress import RecoveryProgress, of_metrics

ASK_TIMEOUT_S = 2.0


def ask_recoveries(metrics_ports: Mapping[int, int]) -> dict[int, RecoveryProgress]:
    """Ask the brokers, by id, at these ports, and return the progress of those that still have logs to open."""
    if not metrics_ports:
        return {}
    with ThreadPoolExecutor(len(metrics_ports)) as pool:
        answers = zip(metrics_ports, pool.map(_ask, metrics_ports.values()), strict=True)
    return {broker: progress for broker, progress in answers if progress is not None and progress.remaining_logs}


def _ask(port: int) -> RecoveryProgress | None:
    connection = HTTPConnection(LOOPBACK, port, timeout=ASK_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        return of_metrics(connection.getresponse().read().decode())
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()
