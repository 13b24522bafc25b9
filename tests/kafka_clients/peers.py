"""Run the test suites of other Kafka clients against minibroker, where their packages include the tests.

    python -m tests.kafka_clients.peers [--only NAME,...] [--cache DIR] [--keep DIR]

Each suite is fetched from its package and runs against its own cluster, as its authors run it against Kafka.
`peers.toml` lists the tests that are not applicable here, and those that fail for a known reason. Prints each test as
passed, failed or not applicable, with the reason, and a table. Exit code 1 if a test failed without a known reason, or
passed although it is listed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.cluster_file import ClusterFile, ZooKeeperEntry
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import LOOPBACK, free_ports
from minibroker.deploy.local.processes import let_signals_interrupt
from tests.kafka_clients.peers_security import PROTOCOLS, USERS, Listeners, Security, add_users
from tests.kafka_clients.programs import TOOLS, CannotBuild, jars, java_command, run, tool
from tests.kafka_clients.verdicts import (
    FAILED,
    NOT_APPLICABLE,
    PASSED,
    SKIPPED,
    Found,
    Known,
    Verdict,
    declared_tests,
    judge,
    judge_list,
    read_go,
    read_junit,
    read_part,
    read_runner,
)

KAFKA_PYTHON = "3.0.12"
NODE_RDKAFKA = "3.6.1"
"""The npm package that includes librdkafka's source and tests."""
KAFKA_TOOLS = "3.9.1"
"""The last version that creates topics with the small segments that some tests need."""
SPEAKS = "3.9"
"""The version of Kafka that kafka-python assumes: its API versions are nearest to minibroker's."""
FRANZ_GO = "1.22.3"
KAFKA_GO = "0.4.51"
SMALLEST_SEGMENT = "14"
"""As in Kafka 3.9: tests create topics whose segments have 200 or 10,000 bytes."""
OF_OLD_KAFKA = ("TestClientAddOffsetsToTxn", "TestClientAddPartitionsToTxn", "TestClientInitProducerId")
"""Tests of kafka-go that it runs only for Kafka before 3.0, though they pass with newer brokers."""
SUITE_TIMEOUT_S = 900
TEST_TIMEOUT_S = 60
RUNNER_TIMEOUT_S = 900
"""Limit for the tests of librdkafka that share a number. 0113 takes 500 s, the others at most two minutes."""
SECURED_LIBRDKAFKA = ("0135_sasl_credentials", "0142_reauthentication")
"""Tests of librdkafka that run by SASL_SSL."""
SESSION_MS = "5000"
"""How long a session lasts there. A test produces for longer than that."""

Ledger = dict[str, Known]
Suite = Callable[[Path, Path, Known], Iterator[Found]]
"""Called with the directory of downloads and builds, which the next run reuses, and the run's own directory. Raises
CannotBuild."""


class Up(NamedTuple):
    """A cluster that runs."""

    listeners: Listeners
    security: Security

    @property
    def bootstrap(self) -> str:
        return self.listeners.bootstrap("PLAINTEXT")

    def of(self, protocol: str) -> str:
        return self.listeners.bootstrap(protocol)


@contextmanager
def cluster(directory: Path, brokers: int, first: int = 0, **settings: str) -> Iterator[Up]:
    """A cluster with the number of brokers and the first broker id that the suite expects."""
    zookeeper_port, *ports = free_ports(brokers * len(PROTOCOLS) + 1)
    listeners = Listeners([ports[at : at + len(PROTOCOLS)] for at in range(0, len(ports), len(PROTOCOLS))])
    security = Security(directory.with_name(f"{directory.name}-security"))
    launcher = LocalCluster(directory)
    planned = ClusterFile(
        zookeeper=ZooKeeperEntry(f"{LOOPBACK}:{zookeeper_port}", zookeeper_port),
        brokers=listeners.brokers(first),
        settings={
            "auto.create.topics.enable": "true",
            "num.partitions": "4",
            "default.replication.factor": str(brokers),
            "group.initial.rebalance.delay.ms": "300",
            "authorizer.class.name": "kafka.security.authorizer.AclAuthorizer",
            "allow.everyone.if.no.acl.found": "true",
            # Some tests expect that a dead member is detected soon.
            "group.min.session.timeout.ms": "1000",
            **security.settings(),
            **{name.replace("_", "."): value for name, value in settings.items()},
        },
    )
    launcher.launch(planned)
    try:
        up = Up(listeners, security)
        add_users(up.bootstrap)
        yield up
    finally:
        launcher.down(kill=True)


def execute(command: list[str], directory: Path, log: Path, timeout_s: float, **environment: str) -> str:
    """Run the command and end its children with it. Return an empty string for exit code 0, else how it ended."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"not within {timeout_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return f"it ended with {code}" if code else ""


# -- kafka-python --

PYTHON_PACKAGES = (
    "pytest==9.2.0",
    "pytest-timeout==2.4.0",
    "lz4==4.4.5",
    "python-snappy==0.7.3",
    "zstandard==0.25.0",
    "crc32c==2.9.post0",
)
# Its fixtures start Kafka through this module, which its sdist leaves out. Here the broker already runs.
SERVICE = """class ExternalService:
    def __init__(self, host, port):
        pass

    def stop(self):
        pass

    def dump_logs(self):
        pass


SpawnedService = None
"""
# The suites for SASL and TLS start brokers of their own, and skip themselves otherwise. This plugin lets them use the
# listeners of the broker that already runs.
PLUGIN = """import os
import py
from test.integration.fixtures import KafkaFixture


def instance(broker_id, transport="PLAINTEXT", sasl_mechanism=None, **others):
    port = int(os.environ["PORT_" + transport])
    made = KafkaFixture(
        "localhost", port, broker_id, transport=transport, sasl_mechanism=sasl_mechanism, partitions=4, external=True
    )
    made.ssl_dir = os.environ["SSL_DIR"]
    made.tmp_dir = py.path.local.mkdtemp()
    made.jaas_config = made._jaas_config()
    return made


KafkaFixture.instance = staticmethod(instance)
"""
COMMAND_CONFIG = """security.protocol={transport}
sasl.mechanism={sasl_mechanism}
sasl.jaas.config={jaas_config}
"""
SECURED_PYTHON = ("test_sasl_integration", "test_ssl_integration")


def fetch_kafka_python(cache: Path) -> tuple[Path, Path]:
    """Its source, and a Python with the packages that its tests need."""
    directory = cache / f"kafka-python-{KAFKA_PYTHON}"
    source, python = directory / f"kafka_python-{KAFKA_PYTHON}", directory / "venv" / "bin" / "python"
    if not (directory / "complete").exists():
        directory.mkdir(parents=True, exist_ok=True)
        run([sys.executable, "-m", "venv", "--clear", "venv"], directory)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q"]
        run([*pip, "install", *PYTHON_PACKAGES], directory)
        run([*pip, "download", "--no-deps", "--no-binary", "kafka-python", f"kafka-python=={KAFKA_PYTHON}"], directory)
        run([tool("tar", "tar"), "-xzf", f"{source.name}.tar.gz"], directory)
        # Without it, Python would import the standard library's `test`.
        (source / "test" / "__init__.py").touch()
        (source / "test" / "service.py").write_text(SERVICE)
        (directory / "complete").touch()
    (source / "test" / "listeners.py").write_text(PLUGIN)
    resources = source / "servers" / "resources" / "default"
    resources.mkdir(parents=True, exist_ok=True)
    (resources / "sasl_command.conf").write_text(COMMAND_CONFIG)
    return source, python


def kafka_python(cache: Path, directory: Path, known: Known) -> Iterator[Found]:
    source, python = fetch_kafka_python(cache)
    kafka = kafka_path(cache)
    files = [f"test/integration/{name}.py" for name in SECURED_PYTHON]

    def run_tests(name: str, *chosen: str, **environment: str) -> list[Found]:
        junit, log = directory / f"{name}.xml", directory / f"{name}.log"
        pytest = [str(python), "-m", "pytest", *chosen, f"--junitxml={junit}", "-p", "no:cacheprovider"]
        pytest += ["--tb=short", "--show-capture=no", f"--timeout={TEST_TIMEOUT_S}", "--timeout-method=signal"]
        common = {"KAFKA_VERSION": SPEAKS, "KAFKA_ROOT": str(kafka)}
        ended = execute(pytest, source, log, SUITE_TIMEOUT_S, **common, **environment)
        if not junit.exists():
            raise CannotBuild(f"pytest: {ended}; {' / '.join(log.read_text().splitlines()[-3:])}")
        return read_junit(junit.read_text(), "test.integration")

    with cluster(directory / "cluster", brokers=1) as up:
        others = [f"--ignore={file}" for file in files]
        yield from run_tests("plain", "test/integration", *others, KAFKA_URI=f"kafka://{up.bootstrap}")
        ssl_directory = directory / "ssl"
        ssl_directory.mkdir()
        shutil.copy(up.security.certificates.authority, ssl_directory / "ca-cert")
        ports = {f"PORT_{protocol}": up.of(protocol).partition(":")[2] for protocol in PROTOCOLS}
        environment = {**ports, "SSL_DIR": str(ssl_directory), "ZOOKEEPER_URI": "unused"}
        yield from run_tests("secured", "-p", "test.listeners", *files, **environment)


# -- Go --


def fetch_go(cache: Path, module: str, version: str) -> Path:
    """Copy a module, which includes its tests, and fetch their dependencies."""
    directory = cache / f"{Path(module).name}-{version}"
    if not (directory / "complete").exists():
        go = tool("go", "golang-go")
        told = msgspec.json.decode(run([go, "mod", "download", "-json", f"{module}@v{version}"], cache))
        shutil.rmtree(directory, ignore_errors=True)
        # The original is read-only, and the copy must be writable.
        shutil.copytree(told["Dir"], directory, copy_function=shutil.copyfile)
        run(["chmod", "-R", "u+w", str(directory)], cache)
        run([go, "mod", "tidy"], directory)
        (directory / "complete").touch()
    return directory


def go_test(
    source: Path, package: str, directory: Path, known: Known, own_skips: str | None = None, **environment: str
) -> list[Found]:
    """Run all tests that are not listed as not applicable. `own_skips`: a part of the names of those among them that
    skip themselves, which therefore run."""
    skipped = [name for name in known.not_applicable if own_skips is None or own_skips not in name]
    skip = "|".join(f"^{'$/^'.join(re.escape(part) for part in test.split('/'))}$" for test in skipped)
    found = run_go(source, package, directory, ["-skip", skip], **environment)
    return [*(Found(name, SKIPPED) for name in skipped), *found]


def run_go(source: Path, package: str, directory: Path, chosen: list[str], **environment: str) -> list[Found]:
    command = [tool("go", "golang-go"), "test", "-json", "-count=1", f"-timeout={SUITE_TIMEOUT_S}s", *chosen, package]
    log = directory / "go.log"
    ended = execute(command, source, log, SUITE_TIMEOUT_S + 60, **environment)
    events = "\n".join(line for line in log.read_text().splitlines() if line.startswith("{"))
    if not events:
        raise CannotBuild(f"go test: {ended}; {' / '.join(log.read_text().splitlines()[-3:])}")
    return read_go(events, ended)


# TestOAuthAuth makes tokens without a signature, which no broker here accepts. Let it take signed ones instead.
SIGNED_TOKENS = {
    'oauth.Auth{Token: enc([]byte(`{"alg":"none"}`)) + "." + enc([]byte(claims)) + "."}': (
        'oauth.Auth{Token: map[bool]string{true: os.Getenv("EXPIRED_TOKEN"), false: os.Getenv("VALID_TOKEN")}'
        "[exp.Before(time.Now())]}\n_, _ = enc, claims"
    ),
    '"encoding/base64"': '"encoding/base64"\n"os"',
}


def fetch_franz_go(cache: Path) -> Path:
    source = fetch_go(cache, "github.com/twmb/franz-go", FRANZ_GO)
    file = source / "pkg" / "kgo" / "client_test.go"
    text = file.read_text()
    if "VALID_TOKEN" not in text:
        for before, after in SIGNED_TOKENS.items():
            if before not in text:
                raise CannotBuild(f"{file.name} makes its tokens in another way: correct SIGNED_TOKENS")
            text = text.replace(before, after)
        file.write_text(text)
    return source


def franz_go(cache: Path, directory: Path, known: Known) -> Iterator[Found]:
    source = fetch_franz_go(cache)
    user = USERS[0]
    with cluster(directory / "cluster", brokers=3) as up:
        environment = {
            "KGO_SEEDS": up.bootstrap,
            "KGO_TEST_RF": "3",
            "KGO_TEST_RECORDS": "50000",
            "KGO_LOG_LEVEL": "none",
            "KGO_TEST_SCRAM_SEEDS": up.of("SASL_PLAINTEXT"),
            "KGO_TEST_SCRAM": f"{user.name}:{user.scram[0]}",
            "KGO_TEST_OAUTH_SEEDS": up.of("SASL_PLAINTEXT"),
            "VALID_TOKEN": up.security.token("admin", 3600),
            "EXPIRED_TOKEN": up.security.token("admin", -60),
        }
        # A subtest of the new group protocol that `go test` leaves out keeps its place in a semaphore, and the suite
        # stands still.
        yield from go_test(source, "./pkg/kgo", directory, known, own_skips="848", **environment)


def kafka_go(cache: Path, directory: Path, known: Known) -> Iterator[Found]:
    source = directory / "source"
    settings = {"num_partitions": "1", "message_max_bytes": "60000000", "group_min_session_timeout_ms": "6000"}
    settings["internal_segment_bytes_min"] = SMALLEST_SEGMENT
    with cluster(directory / "cluster", brokers=1, first=1, **settings) as up:
        shutil.copytree(fetch_go(cache, "github.com/segmentio/kafka-go", KAFKA_GO), source)
        host, _, port = up.bootstrap.partition(":")
        sasl_port = up.of("SASL_PLAINTEXT").partition(":")[2]
        # Its tests have no setting for the broker's address.
        for file in [*source.glob("*.go"), *source.glob("sasl/*_test.go")]:
            text = file.read_text().replace("9092", port)
            text = re.sub(r"(localhost|127\.0\.0\.1):9093(?!\D*9094)", rf"{host}:{sasl_port}", text)
            file.write_text(text.replace("localhost", host) if file.stem.endswith("_test") else text)
        found = go_test(source, ".", directory, known, KAFKA_VERSION="3.7.0")
        yield from (each for each in found if each.test not in OF_OLD_KAFKA)
        chosen = ["-run", f"^({'|'.join(OF_OLD_KAFKA)})$"]
        yield from run_go(source, ".", directory, chosen, KAFKA_VERSION="2.8.1")
        yield from run_go(source, "./sasl", directory, [], KAFKA_VERSION="3.7.0")


# -- librdkafka --


def build_librdkafka(cache: Path) -> Path:
    """Build the tests; return their directory, which holds the runner."""
    directory = cache / f"node-rdkafka-{NODE_RDKAFKA}-ssl"
    source = directory / "package" / "deps" / "librdkafka"
    if not (directory / "complete").exists():
        directory.mkdir(parents=True, exist_ok=True)
        # Without it, the build leaves out the tests of its statistics.
        run(
            [tool("g++", "g++ rapidjson-dev"), "-fsyntax-only", "-xc++", "-include", "rapidjson/schema.h", os.devnull],
            directory,
        )
        run([tool("npm", "npm"), "pack", f"node-rdkafka@{NODE_RDKAFKA}"], directory)
        run([tool("tar", "tar"), "-xzf", f"node-rdkafka-{NODE_RDKAFKA}.tgz"], directory)
        make = [tool("make", "make"), f"-j{len(os.sched_getaffinity(0))}"]
        # Without it, the build has no SCRAM either.
        run([tool("g++", "libssl-dev"), "-fsyntax-only", "-xc++", "-include", "openssl/ssl.h", os.devnull], directory)
        run(["./configure", "--disable-sasl", "--disable-curl"], source)
        run([*make, "libs"], source)
        run([*make, "-C", "tests", "build"], source)
        (directory / "complete").touch()
    return source / "tests"


def kafka_path(cache: Path) -> Path:
    """A directory like that of Kafka's distribution, with the console tools that some tests use, and
    the jars for the tests' own Java programs."""
    directory = cache / "kafka"
    lib = jars(cache, "org.apache.kafka", "kafka-tools", KAFKA_TOOLS)
    topics = shlex.join(java_command(f"{lib}/*", "org.apache.kafka.tools.TopicCommand"))
    *run_class, _ = java_command("", "")
    new_lib = jars(cache, "org.apache.kafka", "kafka-tools", TOOLS)
    acls = shlex.join(java_command(f"{new_lib}/*", "org.apache.kafka.tools.AclCommand"))
    scripts = {
        "kafka-acls.sh": f'exec {acls} "$@"',
        "kafka-topics.sh": f'exec {topics} "$@"',
        "kafka-run-class.sh": f'exec {shlex.join(run_class[:-1])} "$CLASSPATH:{lib}/*" "$@"',
    }
    (directory / "bin").mkdir(parents=True, exist_ok=True)
    for name, command in scripts.items():
        script = directory / "bin" / name
        script.write_text(f"#!/bin/sh\n{command}\n")
        script.chmod(0o755)
    libs = directory / "libs"
    libs.unlink(missing_ok=True)
    libs.symlink_to(lib)
    return directory


def librdkafka(cache: Path, directory: Path, known: Known) -> Iterator[Found]:
    tests, kafka = build_librdkafka(cache), kafka_path(cache)
    declared = [each for each in declared_tests((tests / "test.c").read_text()) if not each.is_manual]
    local = sum(each.is_local for each in declared)
    print(f"librdkafka: {local} of its {len(declared)} tests need no broker or bring a mock: left out", flush=True)
    all_names = {each.name for each in declared}
    yield from (Found(name, SKIPPED) for name in known.not_applicable if name.partition("::")[0] in all_names)
    wanted = [each for each in declared if not each.is_local and each.name not in known.not_applicable]
    secured = [each for each in wanted if each.name in SECURED_LIBRDKAFKA]
    wanted = [each for each in wanted if each not in secured]
    for scenario, creates in (("default", "true"), ("noautocreate", "false")):
        of_scenario = [each for each in wanted if scenario in each.scenarios]
        with cluster(
            directory / scenario / "cluster",
            brokers=3,
            auto_create_topics_enable=creates,
            internal_segment_bytes_min=SMALLEST_SEGMENT,
        ) as up:
            runner = Runner(tests, directory / scenario, scenario, kafka, up.bootstrap)
            for number in sorted({each.number for each in of_scenario}):
                names = [each.name for each in of_scenario if each.number == number]
                if whole := [name for name in names if name not in known.parts]:
                    yield from read_runner(whole, *runner.run(number))
                for name in names:
                    for part in known.parts.get(name, []):
                        yield read_part(name, part, *runner.run(number, part))
    user = USERS[0]
    with cluster(directory / "secured" / "cluster", brokers=3, connections_max_reauth_ms=SESSION_MS) as up:
        settings = {
            "security.protocol": "sasl_ssl",
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": user.name,
            "sasl.password": user.scram[0],
            "ssl.ca.location": str(up.security.certificates.authority),
        }
        runner = Runner(tests, directory / "secured", "default", kafka, up.of("SASL_SSL"), settings)
        for each in secured:
            yield from read_runner([each.name], *runner.run(each.number))


class Runner:
    """librdkafka's test-runner against a cluster."""

    def __init__(
        self,
        tests: Path,
        directory: Path,
        scenario: str,
        kafka: Path,
        bootstrap: str,
        security: Mapping[str, str] | None = None,
    ) -> None:
        self._tests = tests
        self._directory = directory
        self._command = ["./test-runner", "-p1", "-L", "-V", f"{SPEAKS}.0", "-s", scenario]
        self._environment = {
            "LD_LIBRARY_PATH": "../src:../src-cpp",
            "RDKAFKA_TEST_CONF": str(directory / "test.conf"),
            "KAFKA_PATH": str(kafka),
            "BROKERS": bootstrap,
        }
        settings = {
            "test.topic.random": "true",
            "test.timeout.multiplier": "3",
            "bootstrap.servers": bootstrap,
            **(security or {}),
        }
        (directory / "test.conf").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))

    def run(self, number: str, part: str = "") -> tuple[bytes | None, str, str]:
        """Run the tests with this number, or only their subtests named `part`. Return the report, the log, and how the
        runner ended."""
        report, log = (self._directory / f"{number}{part.replace(' ', '-')}{suffix}" for suffix in (".json", ".log"))
        environment = {**self._environment, "TESTS": number, "TEST_REPORT": str(report)}
        if part:
            environment["SUBTESTS"] = part
        ended = execute(self._command, self._tests, log, RUNNER_TIMEOUT_S, **environment)
        return report.read_bytes() if report.exists() else None, log.read_text(errors="replace"), ended


SUITES: dict[str, tuple[str, Suite]] = {
    "kafka-python": (KAFKA_PYTHON, kafka_python),
    "kafka-go": (KAFKA_GO, kafka_go),
    "franz-go": (FRANZ_GO, franz_go),
    "librdkafka": (f"of node-rdkafka {NODE_RDKAFKA}", librdkafka),
}
"""Suites by name with version. The quick ones come first."""


def try_suite(name: str, cache: Path, directory: Path, known: Known) -> list[Verdict]:
    directory.mkdir(parents=True, exist_ok=True)
    verdicts: list[Verdict] = []

    def tell(verdict: Verdict) -> None:
        verdicts.append(verdict)
        reason = f": {verdict.reason}" if verdict.reason else ""
        print(f"{name}: {verdict.test}: {verdict.state}{reason}", flush=True)

    try:
        for found in SUITES[name][1](cache, directory, known):
            tell(judge(found, known))
        for stale in judge_list(known, [verdict.test for verdict in verdicts]):
            tell(stale)
    except (CannotBuild, LaunchError) as error:
        tell(Verdict("its end", FAILED, str(error), 0.0, is_known=False))
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SUITES), help="the suites, separated by commas")
    parser.add_argument(
        "--cache", type=Path, default=Path(".minibroker/kafka-clients"), help="kept downloads and builds"
    )
    parser.add_argument("--keep", type=Path, help="use this directory for the clusters and leave it, for their logs")
    arguments = parser.parse_args()
    let_signals_interrupt()
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in SUITES]:
        parser.error(f"unknown suite {unknown[0]!r}: choose from {', '.join(SUITES)}")
    ledger = msgspec.toml.decode((Path(__file__).parent / "peers.toml").read_bytes(), type=Ledger)
    cache = arguments.cache.absolute()
    cache.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, str, int, int, int, int, float]] = []
    with tempfile.TemporaryDirectory(prefix="minibroker-peers-") as temporary:
        for name in names:
            began_s = time.monotonic()
            verdicts = try_suite(name, cache, (arguments.keep or Path(temporary)).absolute() / name, ledger[name])
            of = Counter(verdict.state for verdict in verdicts)
            unknown_failures = sum(not verdict.is_known for verdict in verdicts)
            counts = (of[PASSED], of[FAILED] - unknown_failures, unknown_failures, of[NOT_APPLICABLE])
            rows.append((name, SUITES[name][0], *counts, time.monotonic() - began_s))
    head = ("suite", "version", "passed", "known to fail", "failed", "not applicable", "seconds")
    print("\n{:<14} {:<22} {:>6} {:>13} {:>6} {:>14} {:>7}".format(*head))
    for row in rows:
        print("{:<14} {:<22} {:>6} {:>13} {:>6} {:>14} {:>7.0f}".format(*row))
    sys.exit(1 if any(row[4] for row in rows) else 0)


if __name__ == "__main__":
    main()
