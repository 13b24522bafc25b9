"""Producer ids, never repeated in a cluster: brokers take them in blocks from `/latest_producer_id_block`."""

import asyncio
from collections.abc import Awaitable, Callable

from minibroker.protocol import znodes
from minibroker.protocol.world import BadVersion, ConnectionLoss, NodeExists, NoNode, SessionExpired, ZooKeeperSession
from minibroker.protocol.znodes import ProducerIdBlock

BLOCK_SIZE = 1_000
RETRY_S = 0.1


class ProducerIds:
    """Hands out the ids of this broker's block and fetches the next block when it is used up (ZkProducerIdManager).

    Each id is handed out once: a block whose write may or may not have succeeded is never used.
    """

    def __init__(self, broker_id: int, sessions: Callable[[], Awaitable[ZooKeeperSession]]) -> None:
        self._broker_id = broker_id
        self._sessions = sessions
        self._next = 0
        self._end = 0
        self._lock = asyncio.Lock()

    async def next(self) -> int:
        """Return the next id. If a new block is needed, this waits until ZooKeeper is available."""
        async with self._lock:
            if self._next == self._end:
                block = await self._take_block()
                self._next, self._end = block.first, block.last + 1
            producer_id = self._next
            self._next += 1
            return producer_id

    async def _take_block(self) -> ProducerIdBlock:
        while True:
            try:
                session = await self._sessions()
                try:
                    data, stat = await session.get(znodes.PRODUCER_ID_BLOCK)
                except NoNode:
                    await session.create(znodes.PRODUCER_ID_BLOCK, b"")
                    continue
                last = znodes.decode_producer_id_block(data)
                first = 0 if last is None else last.last + 1
                block = ProducerIdBlock(self._broker_id, first, first + BLOCK_SIZE - 1)
                await session.set(znodes.PRODUCER_ID_BLOCK, znodes.encode_producer_id_block(block), stat.version)
                return block
            except (BadVersion, NodeExists):
                continue
            except (ConnectionLoss, SessionExpired):
                await asyncio.sleep(RETRY_S)
