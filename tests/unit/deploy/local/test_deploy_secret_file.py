from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minibroker.deploy.local import secret_file


def test_a_secret_is_whole_long_and_for_its_owner_alone(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        secret_file.make(path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert len(bytes.fromhex(path.read_text())) == 32
    assert paths[0].read_text() != paths[1].read_text()
    assert sorted(tmp_path.iterdir()) == paths


def test_a_secret_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("what the user wants it to be")
    secret_file.make(path)
    assert path.read_text() == "what the user wants it to be"


def test_many_that_make_it_at_the_same_time_all_find_the_same(tmp_path: Path) -> None:
    def make(path: Path) -> str:
        secret_file.make(path)
        return path.read_text()

    with ThreadPoolExecutor(8) as threads:
        for attempt in range(20):
            path = tmp_path / str(attempt)
            assert len(set(threads.map(make, [path] * 8))) == 1
    assert len(list(tmp_path.iterdir())) == 20


def test_a_secret_that_cannot_be_made_is_said_with_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "minibroker.deploy.local.secret_file", str(tmp_path / "missing" / "secret")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("error: ")
    assert f"mount a volume at {tmp_path / 'missing'}" in ended.stderr


@pytest.mark.parametrize("name", ["once", "twice"])
def test_as_a_command_it_makes_the_file_and_says_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / "secret"
    for _ in range(1 + (name == "twice")):
        command = [sys.executable, "-m", "minibroker.deploy.local.secret_file", str(path)]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        assert ended.stdout + ended.stderr == ""
    assert path.exists()
