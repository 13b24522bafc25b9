"""The documentation's programs run unchanged and without warnings under `python -W error`, and mypy accepts them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from minibroker.client.admin import Admin
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.testing import SyncLocalCluster
from tests.documents import ADDRESS, ROOT, Program, all_programs

PROGRAMS = all_programs()
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}
"""The environment with this Python's `minibroker` command."""
OURS = "minibroker.deploy.testing.plugin"


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with SyncLocalCluster() as cluster:
        yield cluster.bootstrap_servers


async def fresh_topics(bootstrap: str, topics: tuple[str, ...]) -> None:
    """Create the topics, without the records of other programs."""
    async with Admin(bootstrap) as admin:
        for topic in topics:
            with suppress(BrokerError):  # there was none
                await admin.delete_topic(topic)
            async with asyncio.timeout(30):
                while True:
                    try:
                        await admin.create_topic(topic, partitions=3, replication_factor=3)
                        break
                    except BrokerError as error:
                        if error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                            raise
                    await asyncio.sleep(0.1)


def quick_spark(directory: Path) -> dict[str, str]:
    """The environment of Spark programs, with settings for little data instead of the defaults."""
    (directory / "spark-defaults.conf").write_text(
        "spark.driver.memory 512m\n"
        "spark.driver.extraJavaOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC\n"
        "spark.sql.shuffle.partitions 2\n"
        "spark.ui.enabled false\n"
    )
    return {**ENVIRONMENT, "SPARK_CONF_DIR": str(directory)}


def prepared(program: Program, bootstrap: str, directory: Path) -> Path:
    """Run the command that must precede the program; write the program to a file in the directory."""
    asyncio.run(fresh_topics(bootstrap, program.words))
    if program.command is not None:
        command = program.command.replace(ADDRESS, bootstrap)
        subprocess.run(command, shell=True, check=True, timeout=400, cwd=directory, env=quick_spark(directory))
    script = directory / f"{program.name}.py"
    script.write_text(program.text.replace(ADDRESS, bootstrap))
    return script


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [program for program in PROGRAMS if program.how == "run"], ids=lambda program: program.name
)
def test_a_program_of_the_documentation_runs_twice_without_a_warning(
    program: Program, bootstrap: str, tmp_path: Path
) -> None:
    script = prepared(program, bootstrap, tmp_path)
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, "-X", "dev", "-W", "error", str(script)],
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
            cwd=tmp_path,
            env=ENVIRONMENT,
        )
        # With -X dev the loop logs each step longer than 0.1 s, which other load can cause.
        warned = [line for line in ended.stderr.splitlines() if not line.startswith("Executing <")]
        assert (ended.returncode, warned) == (0, []), f"{program.page.name}:{program.line}\n{ended.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [program for program in PROGRAMS if program.how == "loud"], ids=lambda program: program.name
)
def test_a_program_whose_libraries_warn_runs(program: Program, bootstrap: str, tmp_path: Path) -> None:
    script = prepared(program, bootstrap, tmp_path)
    subprocess.run([sys.executable, str(script)], check=True, timeout=400, cwd=tmp_path, env=quick_spark(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [program for program in PROGRAMS if program.how == "pytest"], ids=lambda program: program.name
)
def test_tests_of_the_documentation_pass_without_a_warning(program: Program, tmp_path: Path) -> None:
    script = tmp_path / f"test_{program.name.replace('-', '_')}.py"
    script.write_text(program.text)
    options = [word for plugin in (OURS, *program.words) for word in ("-p", plugin)]
    if "pytest_asyncio.plugin" in program.words:  # it requires this option
        options += ["-o", "asyncio_default_fixture_loop_scope=function"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", *options, str(script)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert ended.returncode == 0, f"{program.page.name}:{program.line}\n{ended.stdout}\n{ended.stderr}"
    assert " passed" in ended.stdout


@pytest.mark.slow
def test_mypy_accepts_every_program_of_the_documentation_in_strict_mode(tmp_path: Path) -> None:
    for program in PROGRAMS:
        (tmp_path / f"{program.name.replace('-', '_')}.py").write_text(program.text)
    settings = tmp_path / "mypy.ini"
    settings.write_text("[mypy]\nstrict = True\nignore_missing_imports = True\n")  # some imports have no types
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(tmp_path / "cache"), *PAGES],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


PAGES = [f"{program.name.replace('-', '_')}.py" for program in PROGRAMS]


def test_programs_are_found_in_the_documentation() -> None:
    assert {program.page.name for program in PROGRAMS} >= {"README.md", "producing.md", "sync.md", "testing.md"}
