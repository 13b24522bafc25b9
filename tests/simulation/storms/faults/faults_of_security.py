"""Faults that are no failures: rights and credentials that are taken from users for a while, while they are in use."""

from __future__ import annotations

import asyncio

from tests.simulation.storms.scene import Scene
from tests.simulation.storms.security import HEARS_WITHIN_S


async def rights_taken(storm: Scene) -> None:
    """Take the rights of a user on a topic, a group or a transactional id, and give them back."""
    if not (holdings := storm.security.holdings):
        return
    holding, seconds = storm.dice.choice(holdings), _span_s(storm)
    storm.count("rights taken", f"of {holding} for {seconds:.1f} s")
    with storm.security.without_rights(holding):
        await asyncio.sleep(seconds)


async def credential_changed(storm: Scene) -> None:
    """Change or delete the credential of a user, mostly for a while."""
    if not (users := storm.security.changeable):
        return
    user, seconds = storm.dice.choice(users), _span_s(storm)
    how = storm.dice.choice(["deleted", "changed", "renewed"])
    storm.count("credential changed", f"of {user}: {how}" + f" for {seconds:.1f} s" * (how != "renewed"))
    if how == "renewed":
        storm.security.renew_password(user)
        return
    with storm.security.with_password(user, None if how == "deleted" else "unheard of"):
        await asyncio.sleep(storm.security.session_s + seconds)


def _span_s(storm: Scene) -> float:
    """Draw how long it lasts, mostly until each broker has heard of it."""
    return storm.dice.choice([1.0, HEARS_WITHIN_S + 2.0, HEARS_WITHIN_S + 8.0]) * storm.dice.uniform(0.8, 1.5)
