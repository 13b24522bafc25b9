"""Which Python and Java Spark gets, and the error without one."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from minibroker.protocol.errors import MinibrokerError
from minibroker.spark_jobs import session
from minibroker.spark_jobs.session import check_packages, names_in_properties, prepare_environment


def fake_java(home: Path, version: str, modules: str | None = None) -> Path:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f'#!/bin/sh\nfor a; do echo "$a"; done\necho \'openjdk version "{version}"\' >&2\n')
    java.chmod(0o755)
    if modules is not None:
        (home / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return java


def test_the_environment_gets_this_python_and_that_java(tmp_path: Path) -> None:
    java = fake_java(tmp_path / "java", "17.0.1", "java.base jdk.incubator.vector")
    environment = {"JAVA_HOME": str(java.parent.parent)}
    prepare_environment(environment)
    assert environment == {
        "JAVA_HOME": str(java.parent.parent),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    environment |= {"PYSPARK_PYTHON": "/other/python"}
    del environment["PYSPARK_DRIVER_PYTHON"]
    prepare_environment(environment)
    assert environment["PYSPARK_DRIVER_PYTHON"] == "/other/python"


def test_a_java_without_the_vector_module_is_not_asked_for_it(tmp_path: Path) -> None:
    java = fake_java(tmp_path / "my java", "25.0.1", "java.base java.xml")
    environment = {"JAVA_HOME": str(java.parent.parent)}
    prepare_environment(environment)
    shim = Path(environment["JAVA_HOME"], "bin", "java")
    assert shim != java
    arguments = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "--add-modules=other", "Main"]
    result = subprocess.run([str(shim), *arguments], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["-cp", "a b", "--add-modules=other", "Main"]


def test_missing_or_old_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    check_packages()
    monkeypatch.setattr(session, "version", lambda package: {"pyspark": "4.1.2", "pyarrow": "30.0"}[package])
    with pytest.raises(MinibrokerError, match=r"pyspark is 4\.1\.2, Spark jobs need 4\.2 or newer: pip install"):
        check_packages()

    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(session, "version", missing)
    with pytest.raises(MinibrokerError, match=r"Spark jobs need pyspark 4\.2 or newer: pip install"):
        check_packages()


def test_the_names_of_a_properties_file_are_found_however_they_are_written() -> None:
    text = "# spark.a 1\nspark.b 2\n  spark.c=3\n\nspark.d : 4\n! spark.e 5\nspark.f\t6 = 7\n"
    assert names_in_properties(text) == {"spark.b", "spark.c", "spark.d", "spark.f"}
    assert names_in_properties("") == set()
