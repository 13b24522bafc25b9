"""The limits of the network layer. Each has a finite default."""

from collections.abc import Mapping

import msgspec

MEBIBYTE = 1024 * 1024


class NetworkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits with Kafka's names, except for those marked "not in Kafka"."""

    num_network_threads: int = 3
    """Processors per data listener. (Kafka's name: here they are not threads, but share the one event loop.)"""
    num_io_threads: int = 8
    """Handler tasks of the data plane, and thereby the number of requests that may wait for a disk at a time."""
    queued_max_requests: int = 500
    control_queued_max_requests: int = 20
    """The same for the control plane (a constant in Kafka)."""
    queued_max_request_bytes: int = 256 * MEBIBYTE
    """Bytes of requests that are queued or being handled, per plane (Kafka's queued.max.request.bytes is unlimited by
    default). A single larger request is accepted when it is alone, so that it does not wait forever."""
    socket_request_max_bytes: int = 100 * MEBIBYTE

    max_connections: int = 4_000
    max_connections_per_ip: int = 2_000
    max_connection_creation_rate: int = 1_000
    """New connections per second, and the maximum burst after a quiet second. Others are delayed."""
    max_connections_of_listeners: Mapping[str, int] = {}
    max_connection_creation_rate_of_listeners: Mapping[str, int] = {}
    max_connections_per_ip_overrides: Mapping[str, int] = {}
    """By address or host name."""
    protected_listener: str | None = None
    """The listener to which `max_connections` and that rate do not apply: that of the brokers, if clients have another
    one. It cannot be changed."""

    max_in_flight_requests_per_connection: int = 100
    """Requests of one connection that are being handled or await their answers (not in Kafka, which allows one)."""
    max_in_flight_bytes_per_connection: int = 64 * MEBIBYTE
    """Bytes of these requests. A single larger request is accepted when it is alone."""
    max_unsent_bytes_of_all: int = 96 * MEBIBYTE
    """Bytes of responses that all clients of data listeners together have not read (not in Kafka)."""
    max_unsent_response_bytes: int = 256 * MEBIBYTE
    """Bytes of responses that a slow client has not read. Above this, the connection is closed (not in Kafka)."""

    connections_max_idle_ms: int = 600_000
    """Applies to data listeners only. An idle control connection is the means by which its other end notices this
    broker's death."""
    frame_timeout_ms: int = 30_000
    """Time from the first byte of a frame to its last (not in Kafka). Clients give up as early as that."""
    write_timeout_ms: int = 30_000
    """Time for which a peer may leave responses unread (not in Kafka)."""
