"""How soon Chromium paints the console's pages of a large cluster: `python -m tests.browser.paint`.

Prints for each page the median and the worst of a few loads: the first paint, the first paint with content, and the
moment when the page was complete, each since the beginning of the navigation. A page with one word comes first: the
browser takes that time on a busy machine whatever it shows.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from minibroker.protocol.model import TopicPartition
from minibroker.sync import Admin
from tests.browser.webdriver import Browser, running_browser
from tests.integration.cli.shell import running_shell
from tests.integration.launcher.test_console_live import Console
from tests.waiting import until_true

TOPIC = "orders"
PAGES = {"/": "#section-partitions table", "/failovers": "#section-failovers p", "/groups": "#section-groups article"}
"""Each page, and what it has when it is complete."""
PAINTS = """
const paint = (name) => performance.getEntriesByName(name)[0]?.startTime ?? null;
const [navigation] = performance.getEntriesByType("navigation");
return [paint("first-paint"), paint("first-contentful-paint"), navigation.domContentLoadedEventEnd || null];
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=1_000)
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--loads", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, running_shell(Path(directory)) as minibroker:
        created = minibroker("topics", "create", TOPIC, "--partitions", str(options.partitions))
        assert created.code == 0, created  # it may have warned that it takes long
        with Admin(minibroker.cluster.bootstrap()) as admin:
            for number in range(options.groups):
                admin.alter_group_offsets(f"group-{number}", {TopicPartition(TOPIC, 0): 0})
        console = Console(minibroker)
        try:
            with running_browser() as browser:
                _measure(browser, "", "data:text/html,<p>word", "p", options.loads)
                for path, complete in PAGES.items():
                    _measure(browser, console.address, path, complete, options.loads)
        finally:
            console.close()


def _measure(browser: Browser, address: str, path: str, complete: str, loads: int) -> None:
    """The first load of a page fills the caches of the browser and of the console, as for any viewer, and is printed
    by itself."""
    taken = []
    for _ in range(loads + 1):
        browser.open(address + path)
        until_true(lambda: browser.run("return document.querySelector(arguments[0]) !== null", complete))
        until_true(lambda: None not in browser.run(PAINTS))
        taken.append(browser.run(PAINTS))
    first, *others = taken
    for name, at_first, values in zip(
        ("first paint", "first paint with content", "complete"), first, zip(*others, strict=True), strict=True
    ):
        print(
            f"{path:<22} {name:<26} first load {at_first:6.0f} ms, then median {statistics.median(values):6.0f} ms, "
            f"worst {max(values):6.0f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
