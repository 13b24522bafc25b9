"""The cluster of deploy/docker-compose.yml as a user starts it at the root, under a project name of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from minibroker.deploy.observing.cluster_view import ClusterView
from minibroker.deploy.scenarios.stages import compose
from minibroker.deploy.scenarios.stages.compose import BROKERS, ZOOKEEPER, service_of

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "minibroker-compose-test"
SERVICES = (ZOOKEEPER, *map(service_of, BROKERS))
CONSOLE_TIMEOUT_S = 10.0


class Containers(compose.Containers):
    """One cluster at a time: PROJECT is a fixed name, so that the remains of an interrupted run are found. The .env at
    the root names the file of Compose."""

    def __init__(self) -> None:
        super().__init__(PROJECT, directory=ROOT)

    def console_page(self, path: str, form: bytes | None = None) -> tuple[int, str]:
        """Return the status and text of a page of the console, or of its answer to a form. 0: it does not answer."""
        try:
            with urlopen(f"{self.console}{path}", form, CONSOLE_TIMEOUT_S) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()
        except (OSError, HTTPException):
            return 0, ""


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Raises TimeoutError with the missing condition."""
    ends_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= ends_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.05)


def is_whole(view: ClusterView, brokers: Sequence[int] = BROKERS) -> bool:
    """Return whether every broker is known, there is a controller, and every replica is in its ISR."""
    return (
        view.controller_id is not None
        and sorted(view.brokers) == sorted(brokers)
        and all(sorted(p.isr_nodes) == sorted(p.replica_nodes) for p in view.partitions.values())
    )
