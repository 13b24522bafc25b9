from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from minibroker.deploy.trials.demo import standard_library_lines, temporary_directory


def test_the_lines_are_those_of_the_standard_library_and_none_is_empty() -> None:
    lines = list(itertools.islice(standard_library_lines(), 100_000))
    assert all(line.strip() for line in lines)
    assert not any(line.endswith((b"\n", b"\r")) for line in lines)
    assert len(set(lines)) > 30_000
    assert any(line.startswith(b"class ") for line in lines)


def test_the_directory_is_removed_at_the_end_and_after_an_interruption() -> None:
    told: list[str] = []
    with temporary_directory(told.append) as directory:
        Path(directory, "file").touch()
    assert not directory.exists()
    with pytest.raises(KeyboardInterrupt), temporary_directory(told.append) as directory:
        raise KeyboardInterrupt
    assert not directory.exists()
    assert told == []


def test_after_an_error_the_logs_are_kept_and_their_place_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told: list[str] = []
    with pytest.raises(ValueError), temporary_directory(told.append) as directory:
        raise ValueError
    assert directory.exists()
    assert told == [f"the logs are kept in {directory}/logs"]
