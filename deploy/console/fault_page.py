"""The page with the buttons that break the cluster, as HTML. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from minibroker.client.cli.timelines.words import clock_time
from minibroker.deploy.console.faults import PROCESS_COMMANDS, Applied, MemberState
from minibroker.deploy.console.markup import Content, Markup, element, in_words
from minibroker.deploy.console.parts import Sections, section, table
from minibroker.deploy.named_faults import NAMED_FAULTS

PATH = "/faults"
CONTROLLER, ALL = "controller", "all"
SHOWN = 50
MAX_WORD = 300
"""Characters of a word: names of topics, groups and transactional ids are shorter."""
STATES = {"running": ("✓ running", "alive"), "paused": ("? paused", "silent"), "gone": ("✗ not running", "dead")}
ONE_OF_MANY = "Commands for one process, as on the command line"
OF_BROKERS = "Faults of the disk, network and clock of brokers of `minibroker up --allow-faults`"


def fault_sections(members: Sequence[MemberState] | None, applied: Sequence[Applied], token: str) -> Sections:
    """`applied` are the commands of this console, the oldest first."""
    rows = [
        *(_row(each.who, each.name, *STATES[each.state], token, faults=each.faults) for each in members or ()),
        _row(CONTROLLER, "the controller", "whichever broker it is", None, token, without=("resume", "start")),
        _row(ALL, "all brokers", "", None, token),
    ]
    said = [
        element(
            "tr",
            element("td", clock_time(each.at_ms), class_="time"),
            element("th", each.command, scope="row"),
            element(
                "td",
                "under way" if each.said is None else in_words(each.said),
                class_="reason dead" if each.failed else "reason",
            ),
        )
        for each in applied[: -SHOWN - 1 : -1]
    ]
    return {
        "members": section("members", table("Processes", ("Process", "State", "Injected faults", "Commands"), rows)),
        "applied": section(
            "applied",
            element("h2", "What the commands did"),
            table("Commands", ("When (UTC)", "Command", "Outcome"), said)
            if said
            else element("p", "No command was given."),
            element("p", element("a", "The failovers that they caused", href="/failovers")) if said else None,
        ),
    }


def refusal(text: str) -> Markup:
    """Return what a browser without JavaScript shows instead of the page."""
    return element(
        "section",
        element("p", in_words(text), role="alert", class_="bad"),
        element("p", element("a", "Back to the faults", href=PATH)),
    )


def who_forms(token: str) -> Markup:
    """Return the forms for processes that have no row and for faults of brokers, which stand outside the sections."""
    return element("div", _process_form(token), _injected_form(token))


def _process_form(token: str) -> Markup:
    return element(
        "form",
        _hidden(token),
        _legend(ONE_OF_MANY, PROCESS_COMMANDS),
        _word("Who", "who", "leader:orders-0", required=True),
        element("datalist", [element("option", value=each) for each in _EXAMPLES], id="whos"),
        _buttons(PROCESS_COMMANDS, ""),
        element("p", id="refusal", role="alert", class_="bad"),
        method="post",
        action=PATH,
        aria_label="Any process",
    )


def _injected_form(token: str) -> Markup:
    does = {name: each.does for name, each in NAMED_FAULTS.items()}
    return element(
        "form",
        _hidden(token),
        _legend(OF_BROKERS, does),
        _word("Who", "who", "leader:orders-0", required=True),
        _word("Time", "time", "200ms", required=False),
        _word("Other", "other", "zookeeper", required=False),
        element(
            "fieldset",
            element("legend", "Options"),
            element(
                "label",
                "--log-dir, of disks ",
                element("input", name="log_dir", type="number", min=1, placeholder="all"),
            ),
            _option("writes", "--writes, of slow-disk", checked=True),
            _option("one_way", "--one-way, of cut"),
            _option("back", "--back, of move-clock"),
            element("span", "--between, of slow-network: Other"),
        ),
        [
            element("button", f"{name} {each.needs}".rstrip(), name="action", value=name)
            for name, each in NAMED_FAULTS.items()
        ],
        method="post",
        action=PATH,
        aria_label="Disk, network and clock of a broker",
    )


def _option(name: str, label: str, *, checked: bool = False) -> Markup:
    return element("label", element("input", type="checkbox", name=name, value="1", checked=checked), f" {label}")


def _word(label: str, name: str, example: str, *, required: bool) -> Markup:
    listed = None if name == "time" else "whos"
    box = element(
        "input",
        name=name,
        list=listed,
        required=required,
        autocomplete="off",
        placeholder=example,
        maxlength=MAX_WORD,
    )
    return element("label", f"{label} ", box)


_EXAMPLES = ("leader:orders-0", "follower:orders-0", "coordinator:billing", "transactions:shop-1", CONTROLLER, ALL)


def _legend(title: str, does: Mapping[str, str]) -> Markup:
    items = [element("li", element("code", action), f": {what}") for action, what in does.items()]
    return element("details", element("summary", in_words(title)), element("ul", items), class_="legend")


def _row(
    who: str,
    name: str,
    state: str,
    kind: str | None,
    token: str,
    without: Iterable[str] = (),
    faults: Sequence[str] = (),
) -> Markup:
    offered = [action for action in PROCESS_COMMANDS if action not in without]
    if faults:
        offered.append("heal")
    form = element(
        "form",
        _hidden(token),
        element("input", type="hidden", name="who", value=who),
        _buttons(offered, name),
        method="post",
        action=PATH,
        aria_label=name,
    )
    return element(
        "tr",
        element("th", name, scope="row"),
        element("td", state, class_=kind),
        element("td", "; ".join(faults) or "–", class_="reason"),
        element("td", form, class_="commands"),
    )


def _buttons(actions: Iterable[str], of: str) -> Content:
    return [
        element("button", action, name="action", value=action, aria_label=f"{action} {of}" if of else None)
        for action in actions
    ]


def _hidden(token: str) -> Markup:
    return element("input", type="hidden", name="token", value=token)
