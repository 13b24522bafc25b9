"""The programs that the matrix runs, one for each client, and their builds.

Each is started as `PROGRAM BOOTSTRAP VERB name=value ...`. It prints lines of cells separated by tabs, and at last
`end`. A null is `\\N`. The verbs and their arguments:

    produce  topic, partitions, first, count, codecs, per_second, base: for each codec in turn, send `count` records
             (`records.full_record`) from number `first` on. Number n goes to partition n % partitions with the
             timestamp base + n, idempotently if the client can. Prints `ack N PARTITION OFFSET` (-1 if the client does
             not know it) or `failed N REASON`.
    consume  topic, partitions, until: read all partitions by assignment from their beginning, until `until` records
             were read. Prints `rec PARTITION OFFSET TIMESTAMP KEY VALUE HEADERS`.
    seek     topic, partitions, offset, time: read the record at `offset` of partition 0. Then print for each partition
             `at PARTITION OFFSET`, the first offset at or after `time` (-1 for none), `first PARTITION OFFSET`, and
             `last PARTITION OFFSET`.
    group    topic, group, strategy: read as a member that commits the records it has printed, until a line or the end
             of its standard input. Prints also `assigned PARTITION` and `revoked PARTITION`.
    count    topic, source, id, directory: run an instance of a Kafka Streams application that counts the records of
             `source` by key, exactly once, until a line or the end of its standard input, and writes each count to
             `topic`. Prints `state NAME`.
    admin    topic: create the topic, use all of the client's administration on it and a group, and delete it. Prints
             `ok STEP` or `bad STEP REASON`. The console tools, Connect and Spark's connector do their usual work.
    transfer topic, source, partitions, group, id, until: move the records of `source` to the same partitions of `topic`
             in transactions that include the group's offsets, until `until` records were committed. Every fourth
             transaction is aborted, and its records are moved again. Prints `moved N` and `aborted N`. Java's program
             also takes session, its session timeout in ms.
    fence    topic, id: commit, abort, be fenced and time out. Prints `ok STEP` or `bad STEP REASON`, and the errors
             that the client shows as `note`.

`consume` reads uncommitted records, unless isolation=read_committed. `settings` says how a program finds the settings
for a secured cluster.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from tests.kafka_clients.records import Expected, full_record, with_empty_header, with_key, without_headers

HERE = Path(__file__).parent
BUILD_TIMEOUT_S = 600

ALL_CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
NEWEST_JAVA = "4.4.0"
OLDEST_JAVA = "2.8.2"
JAVA_BEFORE_KIP_890 = "3.9.1"
"""The last Java client that keeps its epoch from one transaction to the next."""
TOOLS = "4.3.1"
KAFKAJS = "2.2.4"
SPARK_CONNECTOR = "4.2.0"


TRANSACTIONS = ("consume", "transfer", "fence")
"""The verbs that the checks of transactions use."""


class CannotBuild(Exception):
    """A tool is missing, or a build failed; the message names the tool or quotes the build."""


class Program(NamedTuple):
    version: str
    command: list[str]
    codecs: tuple[str, ...] = ALL_CODECS
    strategies: tuple[str, ...] = ("range", "sticky", "cooperative-sticky")
    expected: Expected = full_record
    has_timestamps: bool = True
    """Whether the client can set its records' timestamps."""
    verbs: tuple[str, ...] = ("produce", "consume", "seek", "group", "admin", "transfer", "fence")
    raises_epoch: bool = False
    """Whether each end of a transaction raises the producer's epoch (KIP-890)."""
    library_path: str = ""
    """The directory of the libraries that the program takes first; empty for those of the system."""


Build = Callable[[Path], Program]
"""Called with the directory of downloads and builds, which the next run reuses. Raises CannotBuild."""


def tool(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise CannotBuild(f"{name} is not installed: apt-get install {package}")
    return found


def run(command: list[str], directory: Path, **environment: str) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotBuild(f"`{' '.join(command)}` has not ended within {BUILD_TIMEOUT_S} s") from error
    if done.returncode:
        told = (done.stdout + done.stderr).strip().splitlines()
        raise CannotBuild(f"`{' '.join(command)}` failed: {' / '.join(told[:3] + told[-3:])}")
    return done.stdout


# -- jars --

_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>minibroker</groupId><artifactId>jars</artifactId><version>1</version><dependencies>
<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version></dependency>
<dependency><groupId>org.slf4j</groupId><artifactId>slf4j-nop</artifactId><version>1.7.36</version></dependency>
</dependencies></project>
"""


def jars(cache: Path, group: str, artifact: str, version: str) -> Path:
    """Download an artifact from Maven Central with its dependencies; return their directory."""
    directory = cache / f"{artifact}-{version}"
    lib = directory / "lib"
    if not (directory / "complete").exists():
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "pom.xml").write_text(_POM.format(group=group, artifact=artifact, version=version))
        maven = [tool("mvn", "maven"), "-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime"]
        run([*maven, f"-DoutputDirectory={lib}"], directory)
        (directory / "complete").touch()
    return lib


# A JVM that lives for seconds gains nothing from its second compiler.
JAVA_OPTIONS = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto", "-Xmx256m"]


def java_command(classpath: str, main: str) -> list[str]:
    return [tool("java", "openjdk-17-jdk-headless"), *JAVA_OPTIONS, "-cp", classpath, main]


def java(version: str, *, only_transactions: bool = False) -> Build:
    def build(cache: Path) -> Program:
        lib = jars(cache, "org.apache.kafka", "kafka-clients", version)
        classes = cache / f"java-{version}"
        compiler = [tool("javac", "openjdk-17-jdk-headless"), "-nowarn", "-cp", f"{lib}/*", "-d", str(classes)]
        run([*compiler, *map(str, sorted((HERE / "java").glob("*.java")))], cache)
        program = Program(version, java_command(f"{lib}/*:{classes}", "Client"), raises_epoch=version >= "4")
        return program._replace(strategies=(), verbs=TRANSACTIONS) if only_transactions else program

    return build


# -- librdkafka --


def kcat(cache: Path) -> Program:
    version = re.findall(r"Version (\S+)|librdkafka ([\d.]+)", run([tool("kcat", "kcat"), "-V"], cache))
    return Program(
        f"{version[0][0]}, librdkafka {version[1][1]}",
        [sys.executable, "-m", "tests.kafka_clients.kcat.client"],
        strategies=("range", "cooperative-sticky"),
        expected=without_headers,
        has_timestamps=False,
        verbs=("produce", "consume", "seek", "group"),
    )


def confluent(cache: Path) -> Program:
    import confluent_kafka

    return Program(
        f"{confluent_kafka.__version__}, librdkafka {confluent_kafka.libversion()[0]}",
        [sys.executable, "-m", "tests.kafka_clients.confluent.client"],
        strategies=("range", "cooperative-sticky"),
    )


def kcat_of_today(cache: Path) -> Program:
    """kcat with the librdkafka of confluent-kafka: that of Debian's kcat, 2.0.2, repeats its nonce in SCRAM
    (CVE-2024-56128), which brokers refuse."""
    import confluent_kafka

    libraries = Path(confluent_kafka.__file__).parent.with_name("confluent_kafka.libs")
    directory = cache / "librdkafka"
    directory.mkdir(parents=True, exist_ok=True)
    link = directory / "librdkafka.so.1"
    link.unlink(missing_ok=True)
    link.symlink_to(next(libraries.glob("librdkafka-*.so.1")))
    program = kcat(cache)
    return program._replace(
        version=f"{program.version.partition(',')[0]}, librdkafka {confluent_kafka.libversion()[0]}",
        library_path=str(directory),
    )


# -- Python --


def python(package: str, module: str, strategy: str) -> Build:
    def build(cache: Path) -> Program:
        return Program(
            metadata.version(package),
            [sys.executable, "-m", f"tests.kafka_clients.python.{module}"],
            codecs=("none", "gzip"),
            strategies=(strategy,),
            expected=with_key,
            verbs=("produce", "consume", "group", "admin"),
        )

    return build


# -- Go --


def go(name: str, module: str, strategies: tuple[str, ...]) -> Build:
    def build(cache: Path) -> Program:
        source = HERE / name
        program = cache / name
        run(
            [tool("go", "golang-go"), "build", "-o", str(program), "."], source, GOFLAGS="-mod=readonly -buildvcs=false"
        )
        version = re.search(rf"{re.escape(module)} v(\S+)", (source / "go.mod").read_text())
        assert version is not None
        return Program(version[1], [str(program)], strategies=strategies)

    return build


# -- Node --


def kafkajs(cache: Path) -> Program:
    directory = cache / "kafkajs"
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "client.js"):
        shutil.copy(HERE / "kafkajs" / name, directory / name)
    if not (directory / "node_modules" / "kafkajs").exists():
        run([tool("npm", "npm"), "install", "--no-audit", "--no-fund", "--no-package-lock"], directory)
    return Program(
        KAFKAJS,
        [tool("node", "nodejs"), str(directory / "client.js")],
        codecs=("none", "gzip", "snappy"),
        strategies=("round-robin",),
        expected=with_empty_header,
    )


# -- tools with their own commands --


def console_tools(cache: Path) -> Program:
    lib = jars(cache, "org.apache.kafka", "kafka-tools", TOOLS)
    command = [sys.executable, "-m", "tests.kafka_clients.console.client", *java_command(f"{lib}/*", "")[:-1], "--"]
    return Program(TOOLS, command, strategies=(), verbs=("admin",))


def streams(cache: Path) -> Program:
    lib = jars(cache, "org.apache.kafka", "kafka-streams", TOOLS)
    classes = cache / f"streams-{TOOLS}"
    compiler = [tool("javac", "openjdk-17-jdk-headless"), "-nowarn", "-cp", f"{lib}/*", "-d", str(classes)]
    run([*compiler, str(HERE / "streams" / "Counting.java")], cache)
    return Program(TOOLS, java_command(f"{lib}/*:{classes}", "Counting"), strategies=(), verbs=("count",))


def connect(cache: Path) -> Program:
    libs = [jars(cache, "org.apache.kafka", artifact, TOOLS) for artifact in ("connect-runtime", "connect-file")]
    java = java_command(":".join(f"{lib}/*" for lib in libs), "org.apache.kafka.connect.cli.ConnectDistributed")
    command = [sys.executable, "-m", "tests.kafka_clients.connect.client", *java, "--"]
    return Program(TOOLS, command, strategies=(), verbs=("admin",))


def spark_connector_jars(cache: Path) -> str:
    """Return the jars that spark-sql-kafka needs, for `spark.jars`. Spark brings the other ones."""
    lib = jars(cache, "org.apache.spark", "spark-sql-kafka-0-10_2.13", SPARK_CONNECTOR)
    return ",".join(str(jar) for jar in sorted(lib.glob("*.jar")) if re.search("kafka|commons-pool2", jar.name))


def spark(cache: Path) -> Program:
    import pyspark

    command = [sys.executable, "-m", "tests.kafka_clients.spark_connector.client", spark_connector_jars(cache)]
    return Program(f"{SPARK_CONNECTOR}, Spark {pyspark.__version__}", command, strategies=(), verbs=("admin",))


PROGRAMS: dict[str, Build] = {
    "kcat": kcat,
    "confluent-kafka": confluent,
    "java-oldest": java(OLDEST_JAVA),
    "java-3.9": java(JAVA_BEFORE_KIP_890, only_transactions=True),
    "java-newest": java(NEWEST_JAVA),
    "franz-go": go("franz_go", "github.com/twmb/franz-go", strategies=("range", "sticky", "cooperative-sticky")),
    "kafkajs": kafkajs,
    "console-tools": console_tools,
    "streams": streams,
    "connect": connect,
    "spark": spark,
}

SECURED: dict[str, Build] = {
    "kcat": kcat_of_today,
    "confluent-kafka": confluent,
    "aiokafka": python("aiokafka", "aiokafka_client", "round-robin"),
    "kafka-python": python("kafka-python", "kafka_python_client", "range"),
    "java-newest": java(NEWEST_JAVA),
    "java-oldest": java(OLDEST_JAVA),
    "franz-go": PROGRAMS["franz-go"],
    "kafkajs": kafkajs,
}
"""The programs for `secured`; those that its documentation promises come first. The tests in `tests/integration` run
aiokafka and kafka-python on an open cluster."""
