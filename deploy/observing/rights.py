"""What the cluster does not show to a client by its access control lists.

A broker leaves topics out of its answers without a word, so that not even their existence is told. What is left out
would look like health. The client therefore asks about the topic "*", which only rights to all topics cover. The name
is valid for no topic, so the answer tells nothing else.

Limit: topics that single DENY entries hide, beside a right to all topics, are not noticed.
"""

from __future__ import annotations

from collections.abc import Sequence

from minibroker.client.errors import acl_commands
from minibroker.deploy.observing.cluster_view import ASK_TIMEOUT_S, ClusterView, ask
from minibroker.protocol.acls import AclOperation
from minibroker.protocol.apis import METADATA
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import MetadataRequest, MetadataResponse

ALL_TOPICS = "*"
NOBODYS_TOPIC = "-.-"
"""As `ALL_TOPICS`, where the name must be a legal one."""
TOPICS = "--operation Describe --operation DescribeConfigs --topic '*'"
CONFIGS = "--operation DescribeConfigs --topic '*'"
CLUSTER = "--operation Describe --cluster"
UNKNOWN = {
    TOPICS: "the state of all topics that it does not see",
    CONFIGS: "which partitions have fewer replicas in sync than min.insync.replicas",
    CLUSTER: "log directories that are offline, replicas that are being moved, slow followers, connections to "
    "ZooKeeper, and the controllers' timeline",
}
"""What is unknown without the right, which is named by the options of `minibroker acls add` that give it."""


def missing(answer: MetadataResponse) -> list[str]:
    """Return the rights that the client lacks to see everything, by an answer about the topic `ALL_TOPICS`."""
    found: list[str] = []
    for topic in answer.topics:
        if topic.error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED:
            found.append(TOPICS)
        elif not topic.topic_authorized_operations & (1 << AclOperation.DESCRIBE_CONFIGS):
            found.append(CONFIGS)
    return [*found, CLUSTER] if not answer.cluster_authorized_operations & (1 << AclOperation.DESCRIBE) else found


async def with_missing_rights(view: ClusterView, timeout_s: float = ASK_TIMEOUT_S) -> ClusterView:
    """Add `missing_rights`. All brokers have the same lists, so the first that answers is enough."""
    request = MetadataRequest(
        [ALL_TOPICS], include_topic_authorized_operations=True, include_cluster_authorized_operations=True
    )
    for address in sorted(view.answered):
        answer = await ask(view.access, address, METADATA, request, timeout_s)
        if answer is not None:
            return view._replace(missing_rights=tuple(missing(answer)))
    return view


def told(rights: Sequence[str], principal: str | None) -> str:
    """Return a sentence: what is unknown without these rights, and the remedy. `principal`: None if only the brokers
    know it."""
    unknown = "; ".join(UNKNOWN[options] for options in rights)
    return (
        f"{principal or 'this client'} may not see everything, so this is unknown: {unknown}: an administrator can "
        f"allow it with {acl_commands(principal, rights)}"
    )
