"""Reads the files of `deploy/monitoring`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parents[1] / "deploy" / "monitoring"
_METRIC = re.compile(r"\b(?:kafka|minibroker)[a-z0-9_]*[_:][a-z0-9_:]+\b")


def loaded(name: str) -> Any:
    """Return the contents of a YAML file."""
    return import_module("yaml").safe_load((DIRECTORY / name).read_text(encoding="utf-8"))  # it has no types


def rules() -> list[dict[str, Any]]:
    return [rule for group in loaded("rules.yml")["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DIRECTORY / "grafana-dashboard.json").read_text(encoding="utf-8"))
    return found


def expressions() -> Iterator[str]:
    """Yield the expressions of the rules and of the dashboard's panels."""
    yield from (rule["expr"] for rule in rules())
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


def metrics_of(expression: str) -> list[str]:
    return _METRIC.findall(re.sub(r'"[^"]*"', "", expression))
