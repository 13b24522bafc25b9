"""What the launcher raises, for its users to read."""

from __future__ import annotations

from minibroker.protocol.errors import MinibrokerError


class LaunchError(MinibrokerError):
    """A process could not be started, found or stopped. The text names it and the remedy."""


class LaunchTimedOut(LaunchError, TimeoutError):
    """A process did not get ready, or did not end, in time."""
