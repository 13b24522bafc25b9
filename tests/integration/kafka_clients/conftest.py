"""Fixtures of the tests with Kafka clients."""

from __future__ import annotations

import gc
import socket
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture
def sockets_are_collected() -> Iterator[None]:
    """Close sockets that kafka-python leaves to the garbage collector, which warns about them in any later test, and
    those of failed connections to a killed broker, which it keeps forever."""
    yield
    for each in gc.get_objects():
        if type(each) is socket.socket and each.fileno() >= 0 and each.getsockname()[0] == "0.0.0.0":
            each.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
