"""Settings of Python's collector in a broker's process. Run in this process, and undone afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import minibroker.broker.__main__ as process


@pytest.fixture
def collector() -> Iterator[None]:
    callbacks, threshold = list(gc.callbacks), gc.get_threshold()
    try:
        yield
    finally:
        gc.callbacks[:] = callbacks
        gc.set_threshold(*threshold)
        gc.unfreeze()


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("generation", [1, 2])
def test_what_outlived_a_long_collection_is_not_looked_at_again(
    generation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LONG_COLLECTION_S", 0.0)
    process._bound_pauses_of_the_collector()
    survivor = [object()]
    gc.collect(generation)
    assert gc.get_freeze_count() > 0
    assert not any(known is survivor for known in gc.get_objects())


@pytest.mark.usefixtures("collector")
def test_after_short_collections_everything_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LONG_COLLECTION_S", 3_600.0)
    process._bound_pauses_of_the_collector()
    survivor = [object()]
    before = gc.get_freeze_count()
    gc.collect()
    gc.collect(1)
    assert gc.get_freeze_count() == before
    assert any(known is survivor for known in gc.get_objects())
