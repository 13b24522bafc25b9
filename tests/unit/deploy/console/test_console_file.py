"""The file by which other commands find the console."""

from __future__ import annotations

from pathlib import Path

import msgspec

from minibroker.deploy.local import console_file
from minibroker.deploy.local.console_file import ConsoleFile
from minibroker.deploy.local.processes import Process, this_process


def test_a_console_is_found_while_its_process_lives(tmp_path: Path) -> None:
    assert console_file.address(tmp_path) is None
    console_file.write(tmp_path, "http://127.0.0.1:8080/")
    assert console_file.address(tmp_path) == "http://127.0.0.1:8080/"
    console_file.remove(tmp_path)
    assert console_file.address(tmp_path) is None


def test_a_console_that_was_killed_or_is_another_process_now_is_not_found(tmp_path: Path) -> None:
    for process in (Process(this_process().pid, "earlier"), Process(2**22, "x")):
        (tmp_path / "console.json").write_bytes(msgspec.json.encode(ConsoleFile("http://x/", process)))
        assert console_file.address(tmp_path) is None
        console_file.remove(tmp_path)
        assert (tmp_path / "console.json").exists()
    (tmp_path / "console.json").write_text("{")
    assert console_file.address(tmp_path) is None


def test_a_directory_that_is_not_there_keeps_no_console_from_running(tmp_path: Path) -> None:
    console_file.write(tmp_path / "none", "http://127.0.0.1:8080/")
    assert console_file.address(tmp_path / "none") is None
