"""The errors of the launcher, written for its users."""

from __future__ import annotations

from minibroker.protocol.errors import MinibrokerError


class LaunchError(MinibrokerError):
    """A process could not be started, found or stopped. The text names it and the remedy."""


class LaunchTimedOut(LaunchError, TimeoutError):
    """A process was not ready, or did not end, in time."""
