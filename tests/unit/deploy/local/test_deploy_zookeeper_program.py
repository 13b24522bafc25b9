from __future__ import annotations

from pathlib import Path

import pytest

from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.zookeeper import check_servers, find_program, main


def test_zookeeper_home_comes_first_with_its_configuration_directory(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "zookeeper-3.9.3.jar").touch()
    (tmp_path / "lib" / "slf4j-api-1.jar").touch()
    program = find_program({"ZOOKEEPER_HOME": str(tmp_path)})
    assert program.class_path[0] == tmp_path / "conf"
    assert {path.name for path in program.class_path[1:]} == {"zookeeper-3.9.3.jar", "slf4j-api-1.jar"}


def test_a_zookeeper_home_without_zookeeper_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"no lib/zookeeper-\*\.jar"):
        find_program({"ZOOKEEPER_HOME": str(tmp_path)})


def test_a_machine_without_zookeeper_is_reported_by_make_setup_with_the_error_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("ZOOKEEPER_HOME", str(tmp_path))
    assert main() == 1
    assert capsys.readouterr().err.startswith(f"error: ZOOKEEPER_HOME is {tmp_path}, but there is no lib/")


@pytest.mark.parametrize("servers", ["", "localhost", "localhost:", ":2181", "localhost:0", "localhost:x", "h:70000/a"])
def test_a_malformed_address_is_refused_with_an_example(servers: str) -> None:
    with pytest.raises(LaunchError, match=r"HOST:PORT is expected, for instance 127\.0\.0\.1:2181"):
        check_servers(servers)
