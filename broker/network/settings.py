"""The limits of the network layer. Every one has a finite default."""

import msgspec

MEBIBYTE = 1024 * 1024


class NetworkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Kafka's names where Kafka has the setting; the others say so."""

    num_network_threads: int = 3
    """Processors per data listener. (Kafka's name: here they are not threads, but share the one event loop.)"""
    num_io_threads: int = 8
    """Handler tasks of the data plane: as many requests may be waiting for a disk at a time."""
    queued_max_requests: int = 500
    control_queued_max_requests: int = 20
    """The same for the control plane (a constant in Kafka)."""
    queued_max_request_bytes: int = 256 * MEBIBYTE
    """Bytes of the requests that are queued or being handled, per plane. (queued.max.request.bytes is unlimited by
    default in Kafka.) A single request may exceed it when it is alone, so that nothing waits for ever."""
    socket_request_max_bytes: int = 100 * MEBIBYTE

    max_connections: int = 4_000
    max_connections_per_ip: int = 2_000
    max_connection_creation_rate: int = 1_000
    """New connections per second, and as many at once after a quiet second."""

    max_in_flight_requests_per_connection: int = 100
    """Requests of one connection that are handled but not answered yet, or being handled (not in Kafka, which
    allows one)."""
    max_in_flight_bytes_per_connection: int = 64 * MEBIBYTE
    """The bytes of those. A request that exceeds it by itself is let through alone."""
    max_unsent_response_bytes: int = 256 * MEBIBYTE
    """Responses waiting for a slow reader; beyond it the connection is closed (not in Kafka)."""

    connections_max_idle_ms: int = 600_000
    """Data listeners only. An idle control connection is how its other end learns that this broker has died."""
    frame_timeout_ms: int = 30_000
    """From a frame's first byte to its last (not in Kafka). A client gives up as early as that."""
    write_timeout_ms: int = 30_000
    """How long a peer may leave responses unread (not in Kafka)."""
