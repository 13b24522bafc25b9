"""A topic's settings, as far as its logs care (Kafka's LogConfig)."""

import msgspec


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Kafka's names and defaults where it has them."""

    segment_bytes: int = 1024**3
    index_interval_bytes: int = 4096
    max_message_bytes: int = 1_048_588
    message_timestamp_after_max_ms: int | None = None
    """How far ahead of the broker's clock a batch's largest timestamp may be; None: any time is accepted."""
    producer_id_expiration_ms: int = 86_400_000
    """Forget a producer that was silent for this long while the log was looked after (`checkpoint`)."""
    flush_bytes: int = 32 * 1024**2
    """Flush in the background each time this much was appended: it bounds what a crash leaves to check, and keeps the
    kernel from writing back all at once."""
