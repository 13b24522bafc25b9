"""A process forks, is interrupted, or ends without closing its blocking client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from minibroker.protocol.apis import PRODUCE
from tests.unit.client.scripted_broker import HANG
from tests.unit.client.scripted_thread import ClusterThread, scripted_cluster
from tests.waiting import until_true

PATIENCE_S = 60


@pytest.fixture
def cluster() -> Iterator[ClusterThread]:
    with scripted_cluster() as cluster:
        yield cluster


def program(cluster: ClusterThread, text: str, *options: str) -> subprocess.Popen[str]:
    """Run a script with `bootstrap` and the usual imports."""
    lines = [
        "import os, signal, sys, time, threading, multiprocessing",
        # A shell that runs the tests in the background ignores SIGINT, and the script would inherit that.
        "signal.signal(signal.SIGINT, signal.default_int_handler)",
        "from minibroker.sync import Admin, Consumer, Producer",
        "from minibroker import Closed, DeliveryFailed, ForkedClient",
        f"bootstrap = {cluster.bootstrap!r}",
        text,
    ]
    return subprocess.Popen(
        [sys.executable, *options, "-c", "\n".join(lines)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def run(cluster: ClusterThread, text: str, *options: str) -> tuple[str, str]:
    """Return the script's stdout and stderr. It must exit with 0."""
    code, out, err = ended(program(cluster, text, *options))
    assert code == 0, (out, err)
    return out, err


def hang_all(cluster: ClusterThread) -> None:
    cluster.do(lambda: cluster.cluster.rules.append(lambda received: HANG if received.api is PRODUCE else None))


def connections(cluster: ClusterThread) -> int:
    return cluster.do(lambda: sum(len(node.connections) for node in cluster.cluster.nodes.values()))


# --- the end of the interpreter ---


def test_records_are_sent_though_the_script_ends_without_closing_its_producer(cluster: ClusterThread) -> None:
    _, err = run(
        cluster,
        """
producer = Producer(bootstrap, linger_ms=60_000)
producer.start()
for number in range(1_000):
    producer.send("orders", b"v")
""",
        "-W",
        "always",
    )
    assert len(cluster.values()) == 1_000
    assert "ResourceWarning: <Producer" in err
    assert "was not closed before the interpreter ended" in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("option", ["-Walways", "-Werror", "-Wdefault"])
def test_a_script_ends_soon_though_its_records_cannot_be_sent_and_says_how_many(
    cluster: ClusterThread, option: str
) -> None:
    hang_all(cluster)
    began = time.monotonic()
    _, err = run(
        cluster,
        """
producer = Producer(bootstrap)
producer.start()
for number in range(3):
    producer.send("orders", b"v")
""",
        option,
    )
    assert time.monotonic() - began < 30
    assert "3 records were not acknowledged, and may or may not be in the log" in err
    assert "Traceback" not in err


def test_a_script_with_every_client_open_ends_without_a_word_on_stderr_but_warnings(cluster: ClusterThread) -> None:
    code, _, err = ended(
        program(
            cluster,
            """
clients = [Producer(bootstrap), Consumer(bootstrap, topics=["orders"]), Admin(bootstrap)]
for client in clients:
    client.start()
sys.exit(7)
""",
        )
    )
    assert (code, err) == (7, "")


def test_a_script_ends_though_a_thread_of_its_own_still_sends(cluster: ClusterThread) -> None:
    _, err = run(
        cluster,
        """
producer = Producer(bootstrap)
producer.start()
def work():
    try:
        while True:
            producer.send("orders", b"v")
    except Closed:
        pass
threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
""",
    )
    assert "Traceback" not in err


# --- Ctrl-C ---


def interrupted(cluster: ClusterThread, text: str) -> tuple[int, str, str]:
    """Interrupt the script once it has printed "ready"."""
    process = program(cluster, text)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)  # it waits by now; otherwise the script prints something unexpected
    process.send_signal(signal.SIGINT)
    return ended(process)


@pytest.mark.slow
def test_ctrl_c_ends_a_call_that_waits_and_leaves_the_producer_usable(cluster: ClusterThread) -> None:
    code, out, err = interrupted(
        cluster,
        """
with Producer(bootstrap, linger_ms=600) as producer:
    delivery = producer.send("orders", b"v")
    print("ready", flush=True)
    try:
        delivery.result()
    except KeyboardInterrupt:
        print("interrupted")
    print(delivery.result().offset, producer.send("orders", b"w").result().offset)
""",
    )
    assert (code, out, err) == (0, "interrupted\n0 1\n", "")


def test_ctrl_c_in_the_body_gives_what_was_sent_two_seconds_more(cluster: ClusterThread) -> None:
    code, _, err = interrupted(
        cluster,
        """
with Producer(bootstrap, linger_ms=60_000) as producer:
    for number in range(10_000):
        producer.send("orders", b"v")
    print("ready", flush=True)
    time.sleep(60)
""",
    )
    assert code == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert len(cluster.values()) == 10_000


def test_ctrl_c_in_close_ends_it_and_says_how_many_records_were_left(cluster: ClusterThread) -> None:
    hang_all(cluster)
    began = time.monotonic()
    code, out, err = interrupted(
        cluster,
        """
producer = Producer(bootstrap)
producer.start()
for number in range(3):
    producer.send("orders", b"v")
print("ready", flush=True)
try:
    producer.close()
except KeyboardInterrupt:
    print(producer)
""",
    )
    assert code == 0
    assert out.startswith("<Producer closed")
    assert "3 records were not acknowledged" in err
    assert "Traceback" not in err
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_ctrl_c_ends_a_send_that_waits_for_room(cluster: ClusterThread) -> None:
    hang_all(cluster)
    code, out, _ = interrupted(
        cluster,
        """
with Producer(bootstrap, buffer_memory=1 << 20, max_block_ms=60_000) as producer:
    threading.Timer(1.0, lambda: print("ready", flush=True)).start()
    try:
        while True:
            producer.send("orders", bytes(100_000))
    except KeyboardInterrupt:
        print("interrupted")
        raise
""",
    )
    assert code == -signal.SIGINT
    assert out == "interrupted\n"


# --- fork ---


def test_a_forked_child_must_make_its_own_client_and_its_parent_goes_on(cluster: ClusterThread) -> None:
    out, err = run(
        cluster,
        """
producer = Producer(bootstrap)
producer.start()
producer.send("orders", b"before").result()
waiting = producer.send("orders", b"waiting")
parent = os.getpid()
child = os.fork()
if child == 0:
    for call in (lambda: producer.send("orders", b"x"), producer.flush, producer.drain, producer.start):
        try:
            call()
        except ForkedClient as error:
            assert f"lives in process {parent}, and this is process {os.getpid()}" in str(error), error
        else:
            os._exit(1)
    producer.close()
    with Producer(bootstrap) as own:
        own.send("orders", b"of the child").result()
    del producer
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
producer.send("orders", b"after").result()
producer.close()
""",
        "-W",
        "error",
    )
    assert (out, err) == ("7\n", "")
    assert sorted(value or b"" for value in cluster.values()) == [b"after", b"before", b"of the child", b"waiting"]


def test_a_fork_in_the_midst_of_sending_threads_harms_neither_side(cluster: ClusterThread) -> None:
    out, err = run(
        cluster,
        """
sent = 0
producer = Producer(bootstrap)
producer.start()
stop = threading.Event()
counts = []
def work():
    count = 0
    while not stop.is_set():
        producer.send("orders", b"v")
        count += 1
    counts.append(count)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
children = []
for _ in range(10):
    child = os.fork()
    if child == 0:
        try:
            producer.send("orders", b"x")
        except ForkedClient:
            sys.exit(0)
        sys.exit(1)
    children.append(child)
print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
stop.set()
for thread in threads:
    thread.join()
producer.close()
print(sum(counts))
""",
    )
    codes, count = out.splitlines()
    assert codes == " ".join("0" * 10)
    assert err == ""
    values = cluster.values()
    assert set(values) == {b"v"}
    assert len(values) == int(count)


def test_a_child_keeps_no_connection_of_its_parent_open(cluster: ClusterThread) -> None:
    process = program(
        cluster,
        """
producer = Producer(bootstrap)
producer.start()
producer.send("orders", b"v").result()
if os.fork() == 0:
    sys.stdout.close()
    sys.stderr.close()
    os.close(1), os.close(2)
    time.sleep(15)
    os._exit(0)
print("ready", flush=True)
sys.stdin.readline()
os._exit(0)
""",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert connections(cluster) >= 1
    process.kill()
    until_true(lambda: connections(cluster) == 0)
    ended(process)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_of_multiprocessing_makes_its_own_producer_and_need_not_close_it(
    cluster: ClusterThread, method: str, tmp_path: os.PathLike[str]
) -> None:
    script = os.path.join(tmp_path, "script.py")
    with open(script, "w", encoding="utf-8") as file:
        file.write(
            f"""
import multiprocessing, sys
from minibroker import ForkedClient
from minibroker.sync import Producer

bootstrap = {cluster.bootstrap!r}
producer = None
kept = []

def work(number):
    if producer is not None:
        try:
            producer.send("orders", b"x")
            sys.exit(9)
        except ForkedClient:
            pass
    own = Producer(bootstrap, linger_ms=60_000)
    kept.append(own)
    own.start()
    for _ in range(100):
        own.send("orders", b"%d" % number)

if __name__ == "__main__":
    producer = Producer(bootstrap)
    producer.start()
    producer.send("orders", b"parent").result()
    context = multiprocessing.get_context({method!r})
    workers = [context.Process(target=work, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print([worker.exitcode for worker in workers])
    producer.send("orders", b"parent").result()
    producer.close()
"""
        )
    told = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (told.returncode, told.stdout, told.stderr) == (0, "[0, 0, 0]\n", "")
    values = cluster.values()
    assert values.count(b"parent") == 2
    assert [values.count(b"%d" % number) for number in range(3)] == [100, 100, 100]


def test_a_pool_of_processes_sends_from_each_of_its_workers(cluster: ClusterThread) -> None:
    out, err = run(
        cluster,
        """
from concurrent.futures import ProcessPoolExecutor
own = None
def work(number):
    global own
    if own is None:
        own = Producer(bootstrap)
        own.start()
    return own.send("orders", b"%d" % number).result().partition
with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
    print(set(pool.map(work, range(50))))
""",
    )
    assert (out, err) == ("{0}\n", "")
    assert sorted(int(value or b"") for value in cluster.values()) == list(range(50))
