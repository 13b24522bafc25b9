"""The health check of a broker's container, run in it every few seconds:

    python -m minibroker.deploy.observing.healthcheck [PORT [ssl [CERTIFICATE] | config FILE]]

Exit code 0 if the broker on this host serves, has heard from a controller and knows the brokers of the cluster; else 1,
with the reason on stdout. With `ssl`, the port is that of a listener that is SSL. CERTIFICATE has a certificate and its
key in PEM, if the listener requires one. The broker's certificate is not verified, since the connection does not leave
the host. With `config`, FILE has the settings of a client, as for `--command-config`: a listener that is SASL_SSL or
SASL_PLAINTEXT needs a user. Only then does the check take the time to start an event loop.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

from minibroker.protocol.apis import METADATA, decode_response, decode_response_envelope, encode_request
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.messages import MetadataRequest, MetadataResponse
from minibroker.protocol.model import NO_CONTROLLER

DEFAULT_PORT = 9092
TIMEOUT_S = 1.5


def problem_for_client(port: int, config: str) -> str | None:
    """Return why the broker at this port of this host is not healthy for a client with these settings, or None."""
    from minibroker.client.cli.terminal import security
    from minibroker.client.security import protection
    from minibroker.deploy.observing.access import AsClient

    async def ask() -> MetadataResponse:
        async with asyncio.timeout(TIMEOUT_S):
            access = AsClient(protection("healthcheck", security.read(Path(config))))
            connection = await access.open(("127.0.0.1", port), TIMEOUT_S)
            try:
                return await connection.request(METADATA, MetadataRequest([]), timeout_s=TIMEOUT_S)
            finally:
                connection.close()

    try:
        return _problem_of(asyncio.run(ask()))
    except TimeoutError:
        return f"port {port}: no answer within {TIMEOUT_S:g} s"
    except MinibrokerError as error:
        return f"port {port}: {error}"


def problem(port: int, tls: ssl.SSLContext | None = None) -> str | None:
    """Return why the broker at this port of this host is not healthy, or None."""
    try:
        with (
            socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as below,
            below if tls is None else tls.wrap_socket(below) as connection,
        ):
            connection.sendall(encode_request(METADATA, 1, "healthcheck", MetadataRequest([])))
            size = int.from_bytes(_read(connection, 4), "big")
            answer = decode_response(METADATA, decode_response_envelope(_read(connection, size)))
    except (OSError, MinibrokerError) as error:
        return f"port {port}: {error}"
    return _problem_of(answer)


def _problem_of(answer: MetadataResponse) -> str | None:
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


def _tls(files: Sequence[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    for file in files:
        context.load_cert_chain(file)
    return context


def main() -> int:
    port = int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_PORT
    match sys.argv[2:]:
        case ["config", file]:
            found = problem_for_client(port, file)
        case ["ssl", *files]:
            found = problem(port, _tls(files))
        case _:
            found = problem(port)
    if found is not None:
        print(found)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
