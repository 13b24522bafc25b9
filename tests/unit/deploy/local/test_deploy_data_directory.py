"""Which paths a cluster may have, and how ZooKeeper reads them back from its file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local import zookeeper
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.processes import wait_until_gone
from minibroker.deploy.local.zookeeper import ZooKeeperProgram


@pytest.mark.parametrize(
    ("name", "text"),
    [(b"d\xff", r"/d\\xff is not UTF-8, and settings are: use --data"), (b"a,b", "/a,b has a comma, which separates")],
)
def test_a_data_directory_that_settings_cannot_name_is_refused_before_anything_is_made(
    tmp_path: Path, name: bytes, text: str
) -> None:
    with pytest.raises(LaunchError, match=text):
        LocalCluster(tmp_path / os.fsdecode(name)).up(brokers=1)
    assert list(tmp_path.iterdir()) == []


def test_zookeeper_reads_the_path_of_its_data_as_it_was_given(tmp_path: Path) -> None:
    data = tmp_path / "dä\\t\n𝄞"
    program = ZooKeeperProgram(Path("/bin/true"), [])
    wait_until_gone([zookeeper.start(program, data, tmp_path / "log", 2181)], 5.0)
    [line] = [each for each in (data / "zoo.cfg").read_text("ascii").splitlines() if each.startswith("dataDir=")]
    assert line == f"dataDir={tmp_path}/d\\u00e4\\u005ct\\u000a\\ud834\\udd1e/data"
