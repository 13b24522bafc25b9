"""The precedence of a session's settings: a job's, spark-submit's, spark-defaults.conf's, our defaults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from minibroker.spark_jobs.jobs import DEFAULT_MASTER
from minibroker.spark_jobs.session import prepare_environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json
from minibroker.spark_jobs.session import spark_configuration

found = dict(spark_configuration("ours", settings={"spark.b": "job"}, defaults=DEFAULTS).getAll())
print("FOUND " + json.dumps(found))
"""


def settings(tmp_path: Path, *command: str, **environment: str) -> dict[str, str]:
    """Return the settings of a script that the command runs."""
    script = tmp_path / "script.py"
    defaults = {"spark.master": DEFAULT_MASTER, "spark.a": "default", "spark.b": "default", "spark.c": "default"}
    script.write_text(SCRIPT.replace("DEFAULTS", repr(defaults)))
    (tmp_path / "conf").mkdir(exist_ok=True)
    (tmp_path / "conf" / "spark-defaults.conf").write_text("spark.a file\nspark.b file\n")
    surroundings = os.environ | {"PYTHONPATH": str(ROOT), "SPARK_CONF_DIR": str(tmp_path / "conf")} | environment
    prepare_environment(surroundings)
    ended = subprocess.run(
        [*command, str(script)], env=surroundings, capture_output=True, text=True, timeout=400, check=True
    )
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("FOUND ")]
    found: dict[str, str] = json.loads(line.removeprefix("FOUND "))
    return found


def chosen(found: dict[str, str]) -> tuple[str, ...]:
    return tuple(found[f"spark.{name}"] for name in ("master", "app.name", "a", "b", "c", "ui.enabled"))


def test_what_spark_submit_is_given_wins_over_our_defaults_and_a_jobs_own_settings_over_both(tmp_path: Path) -> None:
    submit = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
    given = ("--master", "local[1]", "--name", "mine", "--conf", "spark.b=line", "--conf", "spark.ui.enabled=true")
    assert chosen(settings(tmp_path, submit, *given)) == ("local[1]", "mine", "file", "job", "default", "true")


@pytest.mark.slow
def test_without_spark_submit_a_file_and_the_environment_win_over_our_defaults(tmp_path: Path) -> None:
    assert chosen(settings(tmp_path, sys.executable)) == (DEFAULT_MASTER, "ours", "file", "job", "default", "false")
    given = "--master local[3] --conf spark.c=line --conf spark.b=line pyspark-shell"
    found = settings(tmp_path, sys.executable, PYSPARK_SUBMIT_ARGS=given)
    assert chosen(found) == ("local[3]", "ours", "file", "job", "line", "false")
    assert found["spark.ui.showConsoleProgress"] == "false"
