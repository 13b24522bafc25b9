"""The health check of a broker's container: `python -m minibroker.deploy.observing.healthcheck [PORT]`.

Exit code 0 if the broker on this host serves, has heard from a controller and knows the brokers of the cluster; else 1,
with the reason on stdout. It runs every few seconds in every container, so it does without an event loop.
"""

from __future__ import annotations

import socket
import sys

from minibroker.protocol.apis import METADATA, decode_response, decode_response_envelope, encode_request
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.messages import MetadataRequest
from minibroker.protocol.model import NO_CONTROLLER

DEFAULT_PORT = 9092
TIMEOUT_S = 1.5


def problem(port: int) -> str | None:
    """Return why the broker at this port of this host is not healthy, or None."""
    try:
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
            connection.sendall(encode_request(METADATA, 1, "healthcheck", MetadataRequest([])))
            size = int.from_bytes(_read(connection, 4), "big")
            answer = decode_response(METADATA, decode_response_envelope(_read(connection, size)))
    except (OSError, MinibrokerError) as error:
        return f"port {port}: {error}"
    if answer.controller_id == NO_CONTROLLER or not answer.brokers:
        return "it has not heard from a controller yet"
    return None


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("closed before it answered")
        data += more
    return data


def main() -> int:
    found = problem(int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_PORT)
    if found is not None:
        print(found)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
