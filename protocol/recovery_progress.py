"""A broker's progress in opening its logs, which may take long after a crash.

Brokers report it in their log and metrics (KIP-831), and `minibroker status` shows it.
"""

from __future__ import annotations

import msgspec

from minibroker.protocol.words import BYTE_UNITS


class RecoveryProgress(msgspec.Struct, frozen=True):
    """The progress in one log directory, or in several together."""

    logs: int = 0
    """Logs that the broker found when it started."""
    remaining_logs: int = 0
    """Logs that are not open yet."""
    remaining_segments: int = 0
    """Segments still to be read. Only segments beyond the recovery point, up to which all is on disk, are read."""
    bytes: int = 0
    """Bytes of all segments to be read."""
    remaining_bytes: int = 0

    def __str__(self) -> str:
        """`3 of 12 logs, 1.2 of 4.0 GB`."""
        done = self.bytes - self.remaining_bytes
        size, unit = next((size, unit) for size, unit in BYTE_UNITS if self.bytes >= size or size == 1)
        decimals = 0 if size == 1 else 1
        return (
            f"{self.logs - self.remaining_logs:,} of {self.logs:,} logs, "
            f"{done / size:,.{decimals}f} of {self.bytes / size:,.{decimals}f} {unit}"
        )


METRICS = {
    "logs": "minibroker_log_recovery_logs",
    "remaining_logs": "kafka_log_logmanager_remaininglogstorecover",
    "remaining_segments": "kafka_log_logmanager_remainingsegmentstorecover",
    "bytes": "minibroker_log_recovery_bytes",
    "remaining_bytes": "minibroker_log_recovery_remaining_bytes",
}
"""The gauge of each field; its label `dir` names the log directory."""


def of_metrics(text: str) -> RecoveryProgress:
    """Return the progress in all log directories together, from a broker's page of metrics."""
    found = dict.fromkeys(METRICS, 0)
    for line in text.splitlines():
        for field, name in METRICS.items():
            if line.startswith(f"{name}{{"):
                found[field] += int(float(line.rpartition(" ")[2]))
    return RecoveryProgress(**found)
