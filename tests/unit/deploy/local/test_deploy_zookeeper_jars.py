from __future__ import annotations

import hashlib
import http.server
import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local import zookeeper_jars as module
from minibroker.deploy.local.zookeeper_jars import MIRROR, zookeeper_jars

A, B = b"the server", b"its log"
REMEDY = "or install Debian's package zookeeper, or set ZOOKEEPER_HOME to an unpacked ZooKeeper, or name a running one"


class Mirror:
    """An HTTP server on the loopback with these files, which counts the requests."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.requests: list[str] = []
        self.files = dict(files)
        mirror = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.requests.append(self.path)
                contents = mirror.files.get(self.path)
                self.send_response(404 if contents is None else 200)
                # A broken connection looks like this: fewer bytes than announced.
                self.send_header("Content-Length", str(len(contents or b"") + mirror.missing_bytes))
                self.end_headers()
                self.wfile.write(contents or b"")

            def log_message(self, format: str, *args: object) -> None: ...

        self.missing_bytes = 0
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/maven2"


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    locked = {"org/a/1/a-1.jar": hashlib.sha256(A).hexdigest(), "org/b/2/b-2.jar": hashlib.sha256(B).hexdigest()}
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(module, "_SHA256_OF_JARS", locked)
    mirror = Mirror({"/maven2/org/a/1/a-1.jar": A, "/maven2/org/b/2/b-2.jar": B})
    thread = threading.Thread(target=mirror.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield mirror
    finally:
        mirror.server.shutdown()
        thread.join()
        mirror.server.server_close()


@pytest.fixture
def environment(mirror: Mirror, tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path), MIRROR: f"{mirror.url}/"}


def files_below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_jars_are_downloaded_once_which_is_logged(
    mirror: Mirror, environment: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, module.__name__)
    jars = zookeeper_jars(environment)
    assert [(jar.name, jar.read_bytes()) for jar in jars] == [("a-1.jar", A), ("b-2.jar", B)]
    assert sorted(files_below(tmp_path)) == jars
    assert len(mirror.requests) == 2
    directory = tmp_path / "minibroker" / f"zookeeper-{module.VERSION}"
    assert caplog.messages == [
        f"downloading ZooKeeper {module.VERSION} (4 MB, once) from {mirror.url} to {directory}",
    ]

    assert zookeeper_jars(environment) == jars
    assert len(mirror.requests) == 2
    assert len(caplog.messages) == 1


def test_a_damaged_jar_in_the_cache_is_replaced(
    mirror: Mirror, environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    damaged, whole = zookeeper_jars(environment)
    damaged.write_bytes(A[:-1])
    mirror.requests.clear()
    assert zookeeper_jars(environment) == [damaged, whole]
    assert damaged.read_bytes() == A
    assert mirror.requests == ["/maven2/org/a/1/a-1.jar"]
    assert f"{damaged} is damaged" in caplog.text


def test_a_jar_that_a_mirror_has_altered_is_refused_and_not_kept(
    mirror: Mirror, environment: dict[str, str], tmp_path: Path
) -> None:
    mirror.files["/maven2/org/a/1/a-1.jar"] = b"something else"
    with pytest.raises(LaunchError) as caught:
        zookeeper_jars(environment)
    assert f"{mirror.url}/org/a/1/a-1.jar is not the jar that minibroker expects (its SHA-256 is" in str(caught.value)
    assert REMEDY in str(caught.value)
    assert files_below(tmp_path) == []


def test_an_interrupted_download_is_an_error_and_leaves_nothing(
    mirror: Mirror, environment: dict[str, str], tmp_path: Path
) -> None:
    mirror.missing_bytes = 100
    with pytest.raises(LaunchError, match="cannot be downloaded"):
        zookeeper_jars(environment)
    assert files_below(tmp_path) == []


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:1/maven2", "[Errno 111] Connection refused"),
        ("no-url", "unknown url type: 'no-url/org/a/1/a-1.jar'"),
        ("http://127.0.0.1:x/maven2", "nonnumeric port: 'x'"),
    ],
)
def test_without_a_network_the_error_names_the_jar_and_the_remedies(
    url: str, reason: str, mirror: Mirror, environment: dict[str, str]
) -> None:
    with pytest.raises(LaunchError) as caught:
        zookeeper_jars({**environment, MIRROR: url})
    assert f"{url}/org/a/1/a-1.jar cannot be downloaded ({reason}): try again" in str(caught.value)
    assert f"set {MIRROR} to a mirror of Maven Central, {REMEDY} with --zookeeper HOST:PORT" in str(caught.value)


def test_without_a_network_what_is_cached_is_enough(mirror: Mirror, environment: dict[str, str]) -> None:
    jars = zookeeper_jars(environment)
    assert zookeeper_jars({**environment, MIRROR: "http://127.0.0.1:1/maven2"}) == jars


def test_a_cache_that_cannot_be_written_is_named(mirror: Mirror, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "minibroker").write_bytes(b"in the way")
    with pytest.raises(LaunchError, match=r"a-1\.jar cannot be written \(.*\): set XDG_CACHE_HOME to"):
        zookeeper_jars(environment)
