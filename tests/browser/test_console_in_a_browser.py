"""`minibroker console` as its viewer meets it: in Chromium, on a cluster of real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.webdriver import ENTER, SPACE, TAB, Browser, running_browser
from tests.integration.cli.shell import Shell, running_shell
from tests.integration.launcher.test_console_live import Console
from tests.waiting import until_true

pytestmark = pytest.mark.slow
PAGES = {
    "/": "★ leader",
    "/failovers": "No failover is recorded",
    "/groups": "billing",
    "/metrics": "Records produced per second",
    "/records?topic=orders": "three",
    "/settings?broker=1": "broker.id",
    "/faults": "✓ running",
}
"""Each page, and words that it shows when the cluster has answered."""

CONTRAST = """
const parse = (text) => {
  const found = text.match(/[\\d.]+/g);
  return found ? found.map(Number) : [0, 0, 0, 0];
};
const light = (rgb) => {
  const [r, g, b] = rgb.slice(0, 3).map((each) => {
    const value = each / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (element) => {
  for (let each = element; each !== null; each = each.parentElement) {
    const mark = each.closest(".mark")?.querySelector("circle");
    if (mark) return parse(getComputedStyle(mark).fill);
    const found = parse(getComputedStyle(each).backgroundColor);
    if (found.length < 4 || found[3] > 0) return found;
  }
  return parse(getComputedStyle(document.documentElement).backgroundColor);
};
const poor = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || element.closest("script, datalist, title")) continue;
  const style = getComputedStyle(element);
  const front = light(parse(element.closest("svg") ? style.fill : style.color)), back = light(behind(element));
  const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
  if (ratio < 4.5) poor.push([walker.currentNode.data.trim(), element.tagName, ratio.toFixed(2)]);
}
return poor;
"""
"""Texts whose contrast is less than 4.5 to 1 (WCAG 2, AA)."""


@pytest.fixture(scope="module")
def minibroker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    directory: Path = tmp_path_factory.mktemp("console")
    with running_shell(directory, allow_faults=True) as shell:
        shell.ok("topics", "create", "orders", "--partitions", "3")
        shell.ok("produce", "orders", stdin=b'one\n{"two":2}\nthree\n')
        shell.ok("consume", "orders", "--group", "billing", "--from", "earliest", "--count", "3")
        yield shell


@pytest.fixture
def console(minibroker: Shell) -> Iterator[Console]:
    minibroker("resume", "all")
    minibroker("start", "all")
    minibroker.healthy()
    console = Console(minibroker, "--allow-faults")
    yield console
    console.close()


@pytest.fixture
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


TOO_WIDE = """
return [...document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > box.clientWidth + 1)
  .map((box) => box.ariaLabel).filter((label) => label !== 'Time axis');
"""


def _is_quiet(browser: Browser) -> bool:
    """Whether the browser has nothing to complain of, such as a script that was blocked."""
    return [entry["message"] for entry in browser.log("browser") if entry["level"] == "SEVERE"] == []


def test_each_page_is_live_loads_nothing_from_elsewhere_and_has_readable_contrast(
    console: Console, browser: Browser
) -> None:
    for path, words in PAGES.items():
        browser.open(console.address + path)
        browser.until("main", words)
        browser.until("#connection", "live")
        requests = browser.requests()
        assert any(each.endswith("/static/console.css") for each in requests)
        assert [each for each in requests if not each.startswith(f"{console.address}/")] == [], path
        for scheme in ("light", "dark"):
            browser.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            assert browser.run(CONTRAST) == [], (path, scheme)
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), path
        assert _is_quiet(browser), path
    # Each is reached by the links at the top.
    for title in ("Failovers", "Groups", "Metrics", "Records", "Settings", "Faults", "Overview"):
        browser.run("[...document.querySelectorAll('nav a')].find((a) => a.text === arguments[0]).click()", title)
        browser.until("h1", title)


def test_a_page_without_javascript_is_complete(console: Console, browser: Browser) -> None:
    browser.devtools("Emulation.setScriptExecutionDisabled", value=True)
    for path, words in PAGES.items():
        browser.open(console.address + path)
        source = browser.devtools("DOM.getOuterHTML", nodeId=browser.devtools("DOM.getDocument")["root"]["nodeId"])
        assert words in source["outerHTML"] or path == "/metrics", path
        assert "not live: reload for news" in source["outerHTML"]


def test_a_failover_is_watched_live(minibroker: Shell, console: Console, browser: Browser) -> None:
    browser.open(f"{console.address}/failovers")
    browser.until("main", "No failover is recorded")
    browser.run("window.stayed = true")
    killed = minibroker.ok("kill", "leader:orders-0").split()[-1]
    browser.until("main", f"Broker {killed} was lost", " until ", "assumed its role")
    assert browser.run("return document.querySelectorAll('svg.axis .mark').length") >= 3
    assert browser.run("return window.stayed")
    assert browser.run(CONTRAST) == []
    # Its steps stay as the viewer left them while the page changes.
    browser.run("document.querySelector('details').open = false")
    minibroker.ok("start", killed)
    browser.open(f"{console.address}/")
    browser.until("#section-troubles", "Every partition has a leader")
    minibroker.ok("kill", killed)
    browser.until("#section-brokers", "✗ dead")
    browser.until("#section-troubles", "out of sync")
    assert browser.run(CONTRAST) == []
    assert _is_quiet(browser)


def test_the_session_of_a_paused_broker_counts_down(minibroker: Shell, console: Console, browser: Browser) -> None:
    browser.open(f"{console.address}/")
    browser.until("#section-brokers", "registered, timeout 6 s")
    browser.run(
        "setInterval(() => { const time = document.querySelector('[data-per-second=\"-1\"]');"
        "if (time === null) return; time.first ??= time.textContent;"
        "window.ticked ||= time.textContent < time.first; }, 20)"
    )
    minibroker.ok("pause", "3")
    browser.until("#section-brokers", "session ends in")
    assert browser.run(CONTRAST) == []
    browser.until("#section-brokers", "over; last answer at")
    assert browser.run("return window.ticked")


def test_each_button_acts_and_its_outcome_is_shown(console: Console, browser: Browser) -> None:
    browser.open(f"{console.address}/faults")
    browser.until("#section-members", "✓ running")
    browser.run("window.stayed = true")

    def press(action: str, name: str, said: str) -> None:
        browser.click(f'button[aria-label="{action} {name}"]')
        browser.until("#section-applied", said)

    def state(name: str, expected: str) -> None:
        script = (
            "return [...document.querySelectorAll('tr')].find((r) => r.cells[0].innerText === arguments[0]).innerText"
        )
        until_true(lambda: expected in browser.run(script, name))

    for name, who in (("broker 3", "3"), ("ZooKeeper", "zookeeper")):
        for action, shown in {"pause": "? paused", "resume": "✓ running", "kill": "✗ not running"}.items():
            press(action, name, f"{action}: {name}")
            state(name, shown)
        press("start", name, f"start: {name}")
        state(name, "✓ running")
        press("resume", name, f"resume {who}\t{name} is not paused")
        press("start", name, f"start {who}\t")
        browser.until("#section-applied", "is running already")
    press("stop", "broker 3", "stop: broker 3")
    state("broker 3", "✗ not running")
    for action in ("start", "pause", "resume", "stop", "start", "kill"):
        press(action, "all brokers", f"{action}: broker ")
        browser.until("#section-applied tbody tr", f"{action}: broker ")
    press("start", "all brokers", "start: broker 1")
    browser.until("#section-applied tbody tr", "start: broker 1, broker 2, broker 3")
    for action in ("pause", "kill", "stop"):
        press(action, "the controller", f"{action} controller")
        browser.until("#section-applied tbody tr", f"{action}: broker ")
    # What the form says, and where it refuses.
    browser.click("input[name=who]")
    browser.press("somebody", ENTER)
    browser.until("#refusal", "'somebody' names no process", "leader:TOPIC-PARTITION")
    assert browser.run("return window.stayed")
    browser.open(f"{console.address}/failovers")
    browser.until("#section-faults", "kill all", "stop controller")
    browser.until("#section-failovers", "Applied from this console: ")
    assert browser.run(CONTRAST) == []


def test_each_fault_of_a_broker_has_a_button(console: Console, browser: Browser) -> None:
    browser.open(f"{console.address}/faults")
    browser.until("#section-members", "✓ running")
    form = 'form[aria-label="Disk, network and clock of a broker"]'

    def press(action: str, said: str, **words: str) -> None:
        for name in ("who", "time", "other"):
            browser.run(f"document.querySelector('{form} [name={name}]').value = arguments[0]", words.get(name, ""))
        browser.click(f"{form} button[value={action}]")
        browser.until("#section-applied tbody tr", said)

    press("slow-disk", "slow-disk: broker 2", who="2", time="20ms")
    browser.until("#section-members", "each write in", "takes 20 ms longer")
    press("slow-network", "slow-network: broker 2", who="2", time="5ms")
    press("drop-connections", "drop-connections: broker 2", who="2")
    browser.click(f"{form} input[name=back]")
    press("move-clock", "move-clock: broker 2", who="2", time="10s")
    browser.until("#section-members", "its wall clock is 10 s behind")
    press("slow-network", "slow-network: broker 2, broker 3", who="2", time="5ms", other="3")
    browser.until("#section-applied tbody tr", "fault slow-network 2 5ms --between 3")
    press("move-coordinator", "move-coordinator: broker ", who="coordinator:billing")
    browser.click("form[aria-label='broker 2'] button[value=heal]")
    browser.until("#section-applied tbody tr", "heal: broker 2")
    browser.click(f"{form} input[name=one_way]")
    press("cut", "cut: broker 2, broker 3", who="2", other="3")
    browser.until("#section-applied tbody tr", "fault cut 2 3 --one-way")
    press("isolate", "isolate: broker 2", who="2")
    press("heal", "heal: broker 1, broker 2, broker 3", who="all")
    press("fill-disk", "fill-disk: broker 2", who="2")
    press("break-disk", "break-disk: broker 2", who="2")
    press("heal", "heal: broker 2", who="all")
    browser.run(f"document.querySelector('{form} [name=who]').value = '2'")
    browser.click(f"{form} button[value=cut]")
    browser.until("#refusal", "give OTHER as well")
    assert browser.run(CONTRAST) == []


def test_a_narrow_window_needs_no_scrolling_sideways(minibroker: Shell, console: Console, browser: Browser) -> None:
    browser.open(f"{console.address}/failovers")
    killed = minibroker.ok("kill", "leader:orders-0").split()[-1]
    browser.until("main", f"roker {killed} was lost")
    minibroker.ok("start", killed)
    minibroker.healthy()
    browser.devtools("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
    for path, words in (PAGES | {"/failovers": "was lost"}).items():
        browser.open(console.address + path)
        browser.until("main", words)
        browser.until("#connection", "live")
        assert browser.run("return document.documentElement.scrollWidth <= 390"), path
        assert browser.run(TOO_WIDE) == [], path
        assert browser.run(CONTRAST) == [], path
    browser.devtools("Emulation.clearDeviceMetricsOverride")


def test_filters_and_pages_are_used_by_mouse_and_by_keyboard(console: Console, browser: Browser) -> None:
    browser.open(f"{console.address}/records")
    browser.until("#section-extent", "1 topic")
    browser.press(TAB)
    assert browser.run("return document.activeElement.innerText") == "Skip to the content"
    assert browser.run("return document.activeElement.getBoundingClientRect().x") >= 0
    browser.press(ENTER)
    browser.press(TAB)
    assert browser.run("return document.activeElement.name") == "topic"
    browser.press("orders", ENTER)
    browser.until("#section-records", "three")
    assert "topic=orders" in browser.address
    browser.run(
        "document.querySelector('[name=form]').value = 'hex'; document.querySelector('[name=form]').form.submit()"
    )
    browser.until("#section-records", "74 68 72 65 65")

    # Everything that can be used is reached by Tab and shows that it has the focus.
    for path in PAGES:
        browser.open(console.address + path)
        browser.until("#connection", "live")
        count = browser.run(
            "return [...document.querySelectorAll('a, button, input, select, summary, [tabindex]')]"
            ".filter((e) => e.type !== 'hidden' && e.checkVisibility()).length"
        )
        reached = 0
        browser.press(TAB)
        while browser.run("return document.activeElement !== document.body") and reached <= count:
            reached += 1
            style = (
                "const s = getComputedStyle(document.activeElement); return s.outlineStyle !== 'none' && s.outlineWidth"
            )
            assert browser.run(style) not in (False, "0px"), (path, reached)
            browser.press(TAB)
        assert reached >= count, path


def test_a_button_is_pressed_by_keyboard_and_keeps_the_focus(console: Console, browser: Browser) -> None:
    browser.open(f"{console.address}/faults")
    browser.until("#section-members", "✓ running")
    browser.run("document.querySelector('button[aria-label=\"pause broker 2\"]').focus()")
    browser.press(SPACE)
    browser.until("#section-members", "? paused")
    label = "return document.activeElement.getAttribute('aria-label')"
    assert browser.run(label) == "pause broker 2"
    browser.press(TAB)
    assert browser.run(label) == "resume broker 2"
    browser.press(ENTER)
    browser.until("#section-applied", "resume: broker 2")


def test_a_form_of_another_origin_breaks_nothing(minibroker: Shell, console: Console, browser: Browser) -> None:
    other = Console(minibroker)
    try:
        browser.open(other.address)
        browser.until("main", "orders-0")
        # The other console's policy forbids the form; a hostile page has none.
        browser.devtools("Page.setBypassCSP", enabled=True)
        browser.open(other.address)
        browser.run(
            "const f = document.createElement('form'); f.method = 'post'; f.action = arguments[0] + '/faults';"
            "f.innerHTML = '<input name=action value=kill><input name=who value=all>'; document.body.append(f);"
            "HTMLFormElement.prototype.submit.call(f)",
            console.address,
        )
        browser.until("body", "Commands are given by the buttons of this console's own pages")
        browser.open(f"{console.address}/faults")
        browser.until("#section-applied", "No command was given")
    finally:
        other.close()


def test_a_console_that_ends_is_said_not_to_answer(console: Console, browser: Browser) -> None:
    browser.open(console.address)
    browser.until("#connection", "live")
    console.interrupt()
    browser.until("#connection", "the console does not answer; trying again")
