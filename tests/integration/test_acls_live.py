"""Access control lists for principals that client certificates prove: the way of docs/security.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minibroker import (
    AccessControlEntry,
    AclBinding,
    AclOperation,
    AclPermissionType,
    AclResourceType,
    BrokerError,
    ErrorCode,
    ResourcePattern,
    sync,
)
from minibroker.deploy.local.certificates import Certificates
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from tests.waiting import until_true


class Up:
    def __init__(self, certificates: Certificates, port: int) -> None:
        self.certificates = certificates
        self.bootstrap = f"127.0.0.1:{port}"

    def of(self, name: str) -> dict[str, Any]:
        """Return the arguments of a client with a certificate of this name."""
        return {
            "security_protocol": "SSL",
            "ssl_cafile": str(self.certificates.authority),
            "ssl_certfile": str(self.certificates.client(name)),
        }


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    directory: Path = tmp_path_factory.mktemp("acls")
    certificates = Certificates(directory / "certificates")
    plain, secured = free_ports(2)
    settings = {
        "listeners": f"PLAINTEXT://127.0.0.1:{plain},SSL://127.0.0.1:{secured},CONTROLLER://127.0.0.1:0",
        "authorizer.class.name": "kafka.security.authorizer.AclAuthorizer",
        "super.users": "User:admin",
        **certificates.settings(),
        "ssl.client.auth": "required",
        "ssl.principal.mapping.rules": "RULE:^CN=([^,]+).*$/$1/",
    }
    cluster = LocalCluster(directory / "cluster")
    try:
        cluster.up(1, plain, None, settings)
        until_true(lambda: len(cluster.view().brokers) == 1)
        yield Up(certificates, secured)
    finally:
        if cluster.file_or_none() is not None:
            cluster.down(kill=True)


def acl(operation: AclOperation, kind: AclResourceType, name: str) -> AclBinding:
    entry = AccessControlEntry("User:alice", "*", operation, AclPermissionType.ALLOW)
    return AclBinding(ResourcePattern(kind, name), entry)


def test_a_principal_may_do_what_the_super_user_has_allowed_it(up: Up) -> None:
    with sync.Admin(up.bootstrap, **up.of("admin")) as admin:
        admin.create_topic("orders", partitions=1)
        admin.create_topic("secrets", partitions=1)
        admin.create_acls([acl(AclOperation.WRITE, AclResourceType.TOPIC, "orders")])
    with sync.Producer(up.bootstrap, **up.of("alice")) as producer:
        producer.send("orders", b"allowed").result()
        with pytest.raises(BrokerError, match="may not Describe Topic 'secrets'") as raised:
            producer.send("secrets", b"refused").result()
    assert raised.value.code is ErrorCode.TOPIC_AUTHORIZATION_FAILED
    with sync.Admin(up.bootstrap, **up.of("alice")) as alice:
        assert alice.list_topics() == ["orders"]
        with pytest.raises(BrokerError) as raised:
            alice.describe_acls()
    assert raised.value.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    with sync.Producer(up.bootstrap, **up.of("bob")) as producer, pytest.raises(BrokerError):
        producer.send("orders", b"refused").result()
