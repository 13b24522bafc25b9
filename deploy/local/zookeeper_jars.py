"""The jars of a ZooKeeper server, downloaded from Maven Central once and kept in the user's cache.

The problem: a machine without a ZooKeeper needs one for a local cluster: of a known version, unaltered, and without
the network from the second time on.

The choice: a table of the six jars that a standalone server loads, each with its SHA-256. A jar is used only if its
contents have that checksum, whether it comes from the cache or from the network.

Rejected: the jars inside the pyspark wheel, a download of 490 MB. A resolver, jgo 3.2: if a checksum differs, it only
warns; an interrupted download stays in its cache as a valid jar; and from ZooKeeper's POM it resolves 14 MB that a
server does not load (mockito, netty, native libraries), but not two jars that it does load.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from minibroker.deploy.errors import LaunchError

VERSION = "3.9.5"
MAVEN_CENTRAL = "https://repo.maven.apache.org/maven2"
MIRROR = "MINIBROKER_MAVEN_URL"
"""The environment variable that names a mirror of Maven Central. It need not be trusted: the checksums are here."""
OTHERWISE = (
    "install Debian's package zookeeper, or set ZOOKEEPER_HOME to an unpacked ZooKeeper, or name a running one with "
    "--zookeeper HOST:PORT"
)

# Netty and Jetty are missing: they serve TLS and the admin server. The versions are those of ZooKeeper's parent POM.
_SHA256_OF_JARS = {
    f"org/apache/zookeeper/zookeeper/{VERSION}/zookeeper-{VERSION}.jar": (
        "936d025db1a85f085edea25048c3f5b3de5fc29329c371a10925e3b78b0b38a0"
    ),
    f"org/apache/zookeeper/zookeeper-jute/{VERSION}/zookeeper-jute-{VERSION}.jar": (
        "abcbc7f9d6c493daa118da6fa3061a201e2c521217526e8535adfb56b629e52a"
    ),
    "org/slf4j/slf4j-api/2.0.13/slf4j-api-2.0.13.jar": (
        "e7c2a48e8515ba1f49fa637d57b4e2f590b3f5bd97407ac699c3aa5efb1204a9"
    ),
    "org/slf4j/slf4j-simple/2.0.13/slf4j-simple-2.0.13.jar": (
        "3153fe1d689cffb94f1530b58470c306685ba68844de8857116e3b6ebb81d9f7"
    ),
    "io/dropwizard/metrics/metrics-core/4.1.12.1/metrics-core-4.1.12.1.jar": (
        "cec34936faa625039f4e46123eccaa10a9eb9d9a40c6075830cd81330e259cf9"
    ),
    "org/xerial/snappy/snappy-java/1.1.10.5/snappy-java-1.1.10.5.jar": (
        "0f3f1857ed33116583f480b4df5c0218836c47bfbc9c6221c0d73f356decf37b"
    ),
}
_TIMEOUT_S = 30.0
"""For one connection or read to make progress."""

_log = logging.getLogger(__name__)


def zookeeper_jars(environment: Mapping[str, str], also: Mapping[str, str] = MappingProxyType({})) -> list[Path]:
    """Return the jars of the class path, and download those that the cache lacks or has damaged.

    `also`: more jars, by their paths in the repository, with their SHA-256. The cache is below XDG_CACHE_HOME, by
    default `~/.cache`. Raises LaunchError if a jar cannot be downloaded or kept.
    """
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minibroker" / f"zookeeper-{VERSION}"
    jars = {cache / path.rpartition("/")[2]: (path, sha256) for path, sha256 in {**_SHA256_OF_JARS, **also}.items()}
    missing = {jar: source for jar, source in jars.items() if not _is_intact(jar, source[1])}
    if missing:
        repository = (environment.get(MIRROR) or MAVEN_CENTRAL).rstrip("/")
        _log.info("downloading ZooKeeper %s (4 MB, once) from %s to %s", VERSION, repository, cache)
        for jar, (path, sha256) in missing.items():
            _keep(jar, _download(f"{repository}/{path}", sha256))
    return list(jars)


def _is_intact(jar: Path, sha256: str) -> bool:
    try:
        found = hashlib.sha256(jar.read_bytes()).hexdigest()
    except OSError:
        return False
    if found != sha256:
        _log.warning("%s is damaged (its SHA-256 is %s, not %s): it is replaced", jar, found, sha256)
    return found == sha256


def _download(url: str, sha256: str) -> bytes:
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "minibroker"})
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            contents: bytes = response.read()
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if type(error) is urllib.error.URLError else error
        raise LaunchError(
            f"there is no ZooKeeper on this machine, and {url} cannot be downloaded ({reason}): try again with a "
            f"network, or set {MIRROR} to a mirror of Maven Central, or {OTHERWISE}"
        ) from error
    found = hashlib.sha256(contents).hexdigest()
    if found != sha256:
        raise LaunchError(
            f"{url} is not the jar that minibroker expects (its SHA-256 is {found}, not {sha256}): set {MIRROR} to an "
            f"unaltered mirror of Maven Central, or {OTHERWISE}"
        )
    return contents


def _keep(jar: Path, contents: bytes) -> None:
    """Write atomically, since another process may look for the same jar."""
    try:
        jar.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=jar.parent, prefix=f"{jar.name}.", delete=False) as file:
            file.write(contents)
        os.replace(file.name, jar)
    except OSError as error:
        raise LaunchError(
            f"{jar} cannot be written ({error.strerror}): set XDG_CACHE_HOME to a directory that can, or {OTHERWISE}"
        ) from error
