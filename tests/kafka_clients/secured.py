"""Run Kafka clients against a secured cluster of four brokers (TLS, SCRAM, access control lists), and kill a leader.

    python -m tests.kafka_clients.secured [--only NAME,...] [--cache DIR] [--keep DIR]

Each client is a user of its own, which may use the topics, groups and transactional ids that begin with its name, and
whose sessions end after seconds (`connections.max.reauth.ms`). It produces, consumes, and reads in a group of two
members while the leader of its first partition is killed, and administers topics and groups while that broker is
gone. No record may be lost, duplicated, reordered or altered. Then it tries a topic that it may not use, and a wrong
password. The settings of clients are those that `minibroker client-config` prints.

Prints a line for each failed check and a table. Exit code 1 if a check failed or a client could not be built. SIGINT
and SIGTERM also end the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import confluent_kafka

from minibroker.client.admin import Admin
from minibroker.client.administering.scram import UserScramCredentialUpsertion
from minibroker.client.errors import AuthenticationFailed
from minibroker.client.security import Security
from minibroker.deploy.local import secured
from minibroker.protocol.acls import (
    AccessControlEntry,
    AclBinding,
    AclOperation,
    AclPermissionType,
    AclResourceType,
    PatternType,
    ResourcePattern,
)
from minibroker.protocol.model import TopicPartition
from tests.kafka_clients import settings
from tests.kafka_clients.matrix import (
    PER_SECOND,
    UNDER_FIRE,
    Bench,
    Failed,
    Run,
    Tell,
    assigned,
    judge,
    run_main,
    running_cluster,
    try_each,
    try_steps,
)
from tests.kafka_clients.programs import SECURED, Program
from tests.kafka_clients.records import PARTITIONS, problems_of_group
from tests.waiting import until

VICTIM = 4
ASSIGNMENTS = ((VICTIM, 1, 2), (1, VICTIM, 3), (2, 3, VICTIM))
BROKERS = 4
"""As many remain without the killed one as a topic has replicas."""
SETTINGS = {"group.initial.rebalance.delay.ms": "300", "connections.max.reauth.ms": "4000"}
OF_NOBODY = "of-nobody"
"""A topic that no user of a client may use."""
KNOWN_TIMEOUT_S = 40.0
REFUSED_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 90.0
KILLED_TIMEOUT_S = 300.0
"""For the whole check, which has many steps."""


def rights(user: str) -> list[AclBinding]:
    def allowed(kind: AclResourceType, name: str, pattern_type: PatternType, operation: AclOperation) -> AclBinding:
        entry = AccessControlEntry(f"User:{user}", "*", operation, AclPermissionType.ALLOW)
        return AclBinding(ResourcePattern(kind, name, pattern_type), entry)

    own = (AclResourceType.TOPIC, AclResourceType.GROUP, AclResourceType.TRANSACTIONAL_ID)
    of_cluster = (AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS, AclOperation.ALTER)
    return [
        *(allowed(kind, f"{user}-", PatternType.PREFIXED, AclOperation.ALL) for kind in own),
        *(
            allowed(AclResourceType.CLUSTER, "kafka-cluster", PatternType.LITERAL, operation)
            for operation in of_cluster
        ),
    ]


async def add_users(admin: Admin, bootstrap: str, administrator: Security, names: Sequence[str]) -> dict[str, Security]:
    """Create the users and their rights. Return their settings once each broker knows each user."""
    passwords = {name: secrets.token_urlsafe(24) for name in names}
    await admin.alter_user_scram_credentials(
        [UserScramCredentialUpsertion(name, secured.MECHANISM, password) for name, password in passwords.items()]
    )
    await admin.create_acls([binding for name in names for binding in rights(name)])
    users: dict[str, Security] = {
        name: {**administrator, "sasl_plain_username": name, "sasl_plain_password": password}
        for name, password in passwords.items()
    }
    for user in users.values():
        for broker in bootstrap.split(","):
            async with asyncio.timeout(KNOWN_TIMEOUT_S):
                while not await accepts(broker, user):
                    await asyncio.sleep(0.05)
    return users


async def accepts(broker: str, user: Security) -> bool:
    try:
        async with Admin(broker, **user):
            return True
    except AuthenticationFailed:
        return False


def settings_file(directory: Path, name: str, bootstrap: str, user: Security, suffix: str = "") -> Path:
    """Write the lines of `minibroker client-config` for the client."""
    kind = "java" if name.startswith("java") else "librdkafka"
    [text] = [lines.text for lines in secured.lines_for(directory, bootstrap, user) if lines.client == kind]
    file = directory / f"{name}{suffix}.properties"
    file.write_text(text)
    return file


# -- the checks --


async def leader_killed(bench: Bench, observer: Mapping[str, Any], tell: Tell) -> None:
    """Produce, consume, read in a group and administer while the leader of a partition is killed."""
    topic = f"{bench.name}-leader"
    await bench.admin.create_topic(topic, assignments=ASSIGNMENTS)
    members_of = {"topic": topic, "group": f"{topic}-members", "strategy": bench.program.strategies[0]}
    producing = bench.producing(topic, UNDER_FIRE, bench.program.codecs[-1], PER_SECOND)
    async with (
        bench.running("group", **members_of) as first,
        bench.running("group", **members_of) as second,
        bench.running("consume", topic=topic, partitions=PARTITIONS, until=UNDER_FIRE) as consumer,
    ):
        members = [first, second]
        for member in members:
            await member.until(partial(assigned, member), "partitions for each member", STEP_TIMEOUT_S)
        async with bench.running("produce", **producing) as producer:
            await consumer.until(lambda: len(consumer.of("rec")) > UNDER_FIRE // 10, "first records", STEP_TIMEOUT_S)
            async with bench.killed(TopicPartition(topic, 0)) as victim:
                if victim != VICTIM:
                    raise Failed(f"broker {victim} led the partition, not {VICTIM}: the run proves nothing")
                if "admin" in bench.program.verbs:
                    await forgotten(observer, victim)
                    await try_steps(bench, "admin", tell, "admin", topic=f"{bench.name}-admin")
                await producer.ended()
                if producer.of("failed"):
                    raise Failed(producer.told())
                await consumer.until(
                    lambda: len(consumer.of("rec")) >= UNDER_FIRE, f"{UNDER_FIRE} records", STEP_TIMEOUT_S
                )
                await first.until(lambda: seen(members) >= UNDER_FIRE, f"{UNDER_FIRE} in the group", STEP_TIMEOUT_S)
            await consumer.ended()
            bench.judge(producer, consumer, UNDER_FIRE)
        for member in members:
            await member.stop()
    problems = problems_of_group(range(UNDER_FIRE), [each.lines for each in members], bench.program.expected)
    offsets = await bench.admin.list_group_offsets(members_of["group"])
    committed = sum(each.offset for each in offsets.values() if each is not None)
    if committed != UNDER_FIRE:
        problems.append(f"committed: {offsets}")
    if problems:
        raise Failed("; ".join(problems))


async def forgotten(observer: Mapping[str, Any], victim: int) -> None:
    """Wait until the brokers no longer name a broker that is gone: clients of Kafka's protocol hear of it for 5 s."""
    client = confluent_kafka.Producer({**observer, "log_level": 0})

    def named() -> Collection[int]:
        return list(client.list_topics(timeout=KNOWN_TIMEOUT_S).brokers)

    async with asyncio.timeout(KNOWN_TIMEOUT_S):
        while victim in await asyncio.to_thread(named):
            await asyncio.sleep(0.1)


def seen(members: Sequence[Run]) -> int:
    return len({(line[1], line[2]) for member in members for line in member.of("rec")})


async def refused(bench: Bench, topic: str, reason: str) -> None:
    """Produce one record. The client must show the reason, and no acknowledgement."""
    producing = bench.producing(topic, 1, "none")
    async with bench.running("produce", **producing) as producer:

        def is_told() -> bool:
            return producer.has_ended or re.search(reason, producer.text()) is not None

        await until(is_told, REFUSED_TIMEOUT_S, every_s=0.05)
    if producer.of("ack"):
        raise Failed(f"it was acknowledged: {producer.told()}")
    if not re.search(reason, producer.text()):
        raise Failed(f"no {reason!r}: {producer.told()}")


async def try_secured(directory: Path, cache: Path, names: list[str]) -> int:
    """Return how many checks failed."""
    async with running_cluster(directory, BROKERS, SETTINGS, secure=True) as cluster:
        bootstrap, administrator = cluster.bootstrap(), secured.credentials(directory)
        async with Admin(bootstrap, **administrator) as admin:
            users = await add_users(admin, bootstrap, administrator, names)
            await admin.create_topic(OF_NOBODY, partitions=PARTITIONS, replication_factor=3)

            observer = settings.read(settings_file(directory, "observer", bootstrap, administrator))

            def bench(name: str, program: Program, user: Security, suffix: str = "") -> Bench:
                file = settings_file(directory, name, bootstrap, user, suffix)
                return Bench(cluster, admin, name, program, brokers=BROKERS, environment={settings.VARIABLE: str(file)})

            async def check(name: str, program: Program, tell: Tell) -> None:
                own = bench(name, program, users[name])
                wrong = bench(name, program, {**users[name], "sasl_plain_password": "wrong"}, "-wrong")
                await judge(
                    own, "leader killed", partial(leader_killed, observer=observer, tell=tell), tell, KILLED_TIMEOUT_S
                )
                await judge(own, "topic of nobody", partial(refused, topic=OF_NOBODY, reason="(?i)authoriz"), tell)
                await judge(
                    wrong, "wrong password", partial(refused, topic=f"{name}-leader", reason="(?i)authenticat"), tell
                )

            return await try_each(SECURED, names, cache, check)


def main() -> None:
    async def run(directory: Path, cache: Path, names: list[str], arguments: argparse.Namespace) -> int:
        return await try_secured(directory, cache, names)

    run_main(__doc__, SECURED, run)


if __name__ == "__main__":
    main()
