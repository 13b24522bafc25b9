"""A client connection of Kafka's protocol. It sends any request and decodes answers with our layouts."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from minibroker.protocol.connections.framing import FrameReader, response_limit
from minibroker.protocol.kafka.primitives import FrameWriter, MessageReader
from minibroker.protocol.kafka.schema import KafkaApi
from minibroker.protocol.world import Network

CLIENT_ID = "test"


def request_frame(api: KafkaApi, version: int, correlation_id: int, wire: Any) -> bytearray:
    """Return a request with its length. `wire` is the struct of the API's request layout."""
    frame = FrameWriter()
    frame += api.key.to_bytes(2, "big") + version.to_bytes(2, "big") + correlation_id.to_bytes(4, "big")
    frame += len(CLIENT_ID).to_bytes(2, "big") + CLIENT_ID.encode()
    if api.is_flexible(version):
        frame.append(0)
    api.request.compiled(version, api.is_flexible(version)).encode(frame, wire)
    return bytearray(b"".join(frame.pieces()))


def read_response(api: KafkaApi, version: int, frame: bytes) -> tuple[int, Any]:
    """Return the correlation id and the struct of the API's response layout. Raises InvalidMessage."""
    reader = MessageReader(frame)
    correlation_id = int.from_bytes(reader.take(4), "big", signed=True)
    if api.is_flexible(version) and api.name != "ApiVersions":
        reader.skip_tagged_fields()
    body = api.response.compiled(version, api.is_flexible(version)).decode(reader)
    reader.check_end()
    return correlation_id, body


class KafkaConnection(asyncio.BufferedProtocol):
    """`frames` receives the answers in order until `closed` is set."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self.closed = asyncio.Event()
        self._reader = FrameReader(response_limit(1 << 27))
        self._transport: asyncio.Transport | None = None
        self._last_id = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        for frame in self._reader.buffer_updated(nbytes):
            self.frames.put_nowait(bytes(frame))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def write(self, data: bytes | bytearray) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()

    def send(self, api: KafkaApi, version: int, wire: Any) -> int:
        """Send a request, and return its correlation id."""
        self._last_id += 1
        self.write(request_frame(api, version, self._last_id, wire))
        return self._last_id

    async def answer(self, api: KafkaApi, version: int, timeout_s: float = 30) -> tuple[int, Any]:
        """Return the next answer, which must belong to that API."""
        async with asyncio.timeout(timeout_s):
            return read_response(api, version, await self.frames.get())

    async def request(self, api: KafkaApi, version: int, wire: Any) -> Any:
        sent = self.send(api, version, wire)
        correlation_id, body = await self.answer(api, version)
        assert correlation_id == sent
        return body


async def connect(network: Network, host: str, port: int) -> KafkaConnection:
    async with asyncio.timeout(60):
        return await network.connect(host, port, KafkaConnection)
