import asyncio

from minibroker.deploy.local.ports import free_ports
from minibroker.deploy.observing.healthcheck import problem
from tests.unit.client.scripted_broker import ScriptedCluster


async def test_a_broker_that_answers_and_knows_a_controller_is_healthy() -> None:
    async with asyncio.timeout(30), ScriptedCluster() as cluster:
        assert await asyncio.to_thread(problem, cluster.nodes[0].port) is None


def test_a_port_where_nobody_listens_is_not_healthy() -> None:
    (port,) = free_ports(1)
    found = problem(port)
    assert found is not None
    assert str(port) in found
