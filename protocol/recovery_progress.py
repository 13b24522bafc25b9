"""How far a broker is with opening its logs, which may take long after a crash: what it says of itself in its log and
its metrics (KIP-831), and what `minibroker status` makes of it."""

from __future__ import annotations

import msgspec


class RecoveryProgress(msgspec.Struct, frozen=True):
    """Of one log directory, or of several together."""

    logs: int = 0
    """Those that were found when the broker started."""
    remaining_logs: int = 0
    """Those of them that are not open yet."""
    remaining_segments: int = 0
    """Those that are to be read, since they reach past what is known to be on disk, and are not read yet."""
    bytes: int = 0
    """Of all segments that are to be read."""
    remaining_bytes: int = 0

    def __str__(self) -> str:
        """`3 of 12 logs, 1.2 of 4.0 GB`."""
        done = self.bytes - self.remaining_bytes
        size, unit = next((size, unit) for size, unit in _UNITS if self.bytes >= size or size == 1)
        decimals = 0 if size == 1 else 1
        return (
            f"{self.logs - self.remaining_logs:,} of {self.logs:,} logs, "
            f"{done / size:,.{decimals}f} of {self.bytes / size:,.{decimals}f} {unit}"
        )


_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "bytes"))

METRICS = {
    "logs": "minibroker_log_recovery_logs",
    "remaining_logs": "kafka_log_logmanager_remaininglogstorecover",
    "remaining_segments": "kafka_log_logmanager_remainingsegmentstorecover",
    "bytes": "minibroker_log_recovery_bytes",
    "remaining_bytes": "minibroker_log_recovery_remaining_bytes",
}
"""By field: the gauge that has it for each log directory, its label `dir`."""


def of_metrics(text: str) -> RecoveryProgress:
    """What a broker's page of metrics says, of all its log directories together."""
    found = dict.fromkeys(METRICS, 0)
    for line in text.splitlines():
        for field, name in METRICS.items():
            if line.startswith(f"{name}{{"):
                found[field] += int(float(line.rpartition(" ")[2]))
    return RecoveryProgress(**found)
