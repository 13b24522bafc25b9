from __future__ import annotations

import pytest

from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.zookeeper import check_servers, is_serving


def test_the_zookeeper_fixture_serves(zookeeper: str) -> None:
    check_servers(zookeeper)


def test_the_error_names_an_address_without_zookeeper() -> None:
    assert not is_serving("127.0.0.1", 1)
    with pytest.raises(LaunchError, match=r"no ZooKeeper answers at 127\.0\.0\.1:1/chroot"):
        check_servers("127.0.0.1:1/chroot")
