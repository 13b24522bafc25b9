"""The pictures of the console in README.md and docs: `make screenshots`.

A cluster of three brokers under load, whose controller is killed by a button of the console.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.browser.webdriver import Browser, running_browser
from tests.integration.cli.shell import running_shell, start
from tests.integration.launcher.test_console_live import Console
from tests.waiting import until_true

WIDTH, HEIGHT = 1200, 943
SAMPLES = 24
"""Of the plots, two minutes."""
LOAD = """
import itertools, time
from minibroker.sync import Producer
with Producer("{}", value_serializer="json") as producer:
    for number in itertools.count():
        producer.send("orders", {{"order": number, "customer": f"customer-{{number % 97}}", "items": 1 + number % 3}})
        if number % 20 == 0:
            time.sleep(0.02 if number // 4_000 % 2 else 0.05)
"""


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, running_shell(Path(temporary)) as minibroker:
        minibroker.ok("topics", "create", "orders", "--partitions", "6")
        minibroker.ok("topics", "create", "payments", "--partitions", "3")
        load = subprocess.Popen([sys.executable, "-c", LOAD.format(minibroker.cluster.bootstrap())])
        consume = ["consume", "orders", "--group", "billing"]
        reader = start(consume, minibroker.directory, stdout=subprocess.DEVNULL)
        console = Console(minibroker, "--allow-faults")
        try:
            with running_browser(WIDTH, HEIGHT) as browser:
                _take_all(browser, console.address, directory)
        finally:
            console.close()
            for process in (load, reader):
                process.kill()
                process.communicate()


def _take_all(browser: Browser, address: str, directory: Path) -> None:
    def take(name: str, path: str, *words: str) -> None:
        browser.open(address + path)
        browser.until("main", *words)
        browser.until("#connection", "live")
        (directory / f"console-{name}.png").write_bytes(browser.screenshot())

    browser.open(f"{address}/metrics")
    points = "return (document.querySelector('.line')?.getAttribute('points') ?? '').split(' ').length"
    until_true(lambda: browser.run(points) >= SAMPLES, 300)
    browser.open(f"{address}/faults")
    browser.until("#section-members", "✓ running")
    browser.click('button[aria-label="kill the controller"]')
    browser.until("#section-applied", "kill: broker")
    take("faults", "/faults", "✗ not running")
    take("failovers", "/failovers", "was led again", "Applied from this console")
    take("overview", "/", "✗ dead", "out of sync")
    take("metrics", "/metrics", "1 in ten minutes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
