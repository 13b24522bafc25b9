"""The errors of the launcher, written for its users."""

from __future__ import annotations

from operator import methodcaller

from minibroker.protocol.errors import MinibrokerError

hidden_from_pytest = methodcaller("errisinstance", MinibrokerError)
"""The value of `__tracebackhide__` in modules whose frames pytest leaves out when it reports an error of minibroker."""


class LaunchError(MinibrokerError):
    """A process could not be started, found or stopped. The text names it and the remedy."""


class LaunchTimedOut(LaunchError, TimeoutError):
    """A process was not ready, or did not end, in time."""
