"""`minibroker spark` as a user types it, before any Spark is started."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from minibroker import application
from minibroker.client.cli.terminal.output import run_app

ROOT = Path(__file__).parents[3]


def minibroker(packages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command with `packages` in place of the installed packages."""
    environment = os.environ | {"PYTHONPATH": f"{packages}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-P", "-S", "-m", "minibroker", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


@pytest.fixture
def without_spark(tmp_path: Path) -> Path:
    """The installed packages, without Spark."""
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("pyspark", "pyarrow", "py4j")):
            (tmp_path / entry.name).symlink_to(entry)
    return tmp_path


@pytest.mark.parametrize("job", ["ingest", "kappa", "lambda"])
def test_without_pyspark_a_job_says_what_to_install(without_spark: Path, job: str) -> None:
    ended = minibroker(without_spark, "spark", job, "--topics", "t", "--output", "out")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "error: Spark jobs need pyspark 4.2 or newer: pip install pyspark pyarrow\n"


def test_without_pyspark_everything_else_works(without_spark: Path) -> None:
    ended = minibroker(without_spark, "spark", "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "ingest" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("ingest", "--trigger", "soon"), "'soon' is not a time: give one such as 500ms, 10s or 5m"),
        (("ingest", "--compact-after", "1"), "--compact-after 1 would rewrite every batch"),
        (("ingest", "--conf", "memory=1g"), "--conf memory=1g: give spark.NAME=VALUE"),
        (("kappa", "--view", "v9"), "view='v9': there are v1, v2"),
        (("lambda", "--lateness", "1 day"), "'1 day' is not a time"),
        (("kappa", "--output", "out\udcff"), "/out\\xff is not UTF-8"),
        (("ingest", "--checkpoint", "at\udcff"), "/at\\xff is not UTF-8"),
    ],
)
def test_nonsense_is_reported_before_spark_is_started(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job, *options = arguments
    given = ["spark", job, "--topics", "t", "--output", "out", "--bootstrap", "127.0.0.1:1"]
    assert run_app(application(), [*given, *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert expected in printed.err
    assert printed.err.startswith("error: ")


def test_spark_submit_takes_the_settings_of_connections_as_well(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text("security.protocol=SSL\nssl.truststore.location=missing.pem\nsecurity=1\n")
    command = [sys.executable, "-P", str(ROOT / "spark_jobs" / "submit.py"), "--command-config", str(file)]
    job = ("ingest", "--topics", "t", "--output", "out", "--bootstrap", "127.0.0.1:1")
    ended = subprocess.run([*command, *job], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"--command-config='{file}': line 3: 'security' is none of the names" in ended.stderr
