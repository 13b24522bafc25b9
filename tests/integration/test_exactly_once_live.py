"""Read-process-write through one of each fault; `make exactly-once` plays thousands of transactions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.exactly_once import Client, run


@pytest.mark.slow
@pytest.mark.parametrize("client", [Client.MINIBROKER, Client.CONFLUENT])
def test_every_input_is_counted_once_through_each_kind_of_fault(client: Client, tmp_path: Path) -> None:
    report = asyncio.run(run(tmp_path, client, transactions=300))
    assert report["problems"] == [], report
