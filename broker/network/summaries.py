"""Log lines about what strangers can cause as often as they like."""

import logging

INTERVAL_S = 1.0


class Summary:
    """Logs at most once per second, so that a flood of connections does not flood the log."""

    def __init__(self, logger: logging.Logger, listener: str, what: str) -> None:
        self._logger = logger
        self._listener = listener
        self._what = what
        self._since_log = 0
        self._log_after = 0.0

    def log(self, peer: str, reason: str, now: float) -> None:
        self._since_log += 1
        if now < self._log_after:
            return
        self._logger.warning(
            "listener %s %s %d connections, the last of them from %s: %s",
            self._listener,
            self._what,
            self._since_log,
            peer,
            reason,
        )
        self._since_log = 0
        self._log_after = now + INTERVAL_S
