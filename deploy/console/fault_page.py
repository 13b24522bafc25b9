"""The page with the buttons that break the cluster, as HTML. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minibroker.client.cli.terminal.hints import pastable
from minibroker.client.cli.timelines.words import clock_time
from minibroker.deploy.console.faults import ACTIONS, Applied, MemberState
from minibroker.deploy.console.markup import Content, Markup, element, in_words
from minibroker.deploy.console.parts import Sections, section, table

PATH = "/faults"
CONTROLLER, ALL = "controller", "all"
SHOWN = 50
STATES = {"running": ("✓ running", "alive"), "paused": ("? paused", "silent"), "gone": ("✗ not running", "dead")}
ONE_OF_MANY = "The commands for one process, as on the command line: "


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
            table("Commands", ("When", "Command", "Outcome"), said) if said else element("p", "No command was given."),
            element("p", element("a", "The failovers that they caused", href="/failovers")) if said else None,
        ),
    }


def who_form(token: str) -> Markup:
    """Return the form for processes that have no row, which stands outside the sections."""
    return element(
        "form",
        _hidden(token),
        element("p", ONE_OF_MANY, _commands(), class_="legend"),
        element(
            "label",
            "Who ",
            element("input", name="who", list="whos", required=True, autocomplete="off", placeholder="leader:orders-0"),
        ),
        element("datalist", [element("option", value=each) for each in _EXAMPLES], id="whos"),
        _buttons(ACTIONS, ""),
        element("p", id="refusal", role="alert", class_="bad"),
        method="post",
        action=PATH,
        aria_label="Any process",
    )


_EXAMPLES = ("leader:orders-0", "follower:orders-0", "coordinator:billing", "transactions:shop-1", CONTROLLER, ALL)


def _commands() -> Content:
    described = [[element("code", action), f" {what}"] for action, what in ACTIONS.items()]
    return [[", " if at else "", each] for at, each in enumerate(described)]


def _row(
    who: str,
    name: str,
    state: str,
    kind: str | None,
    token: str,
    without: Iterable[str] = (),
    faults: Sequence[str] = (),
) -> Markup:
    heal = element("code", pastable(f"`minibroker heal {who}`").strip("`"))
    offered = [action for action in ACTIONS if action not in without]
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
        element("td", [f"{'; '.join(faults)}: ", heal] if faults else "–", class_="reason"),
        element("td", form, class_="commands"),
    )


def _buttons(actions: Iterable[str], of: str) -> Content:
    return [
        element("button", action, name="action", value=action, aria_label=f"{action} {of}" if of else None)
        for action in actions
    ]


def _hidden(token: str) -> Markup:
    return element("input", type="hidden", name="token", value=token)
