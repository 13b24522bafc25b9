"""What the cluster does not show to a client by its access control lists.

A broker leaves topics out of its answers without a word, so that not even their existence is told. What is left out
would look like health. The client therefore asks about the topic "*", which only rights to all topics cover. The name
is valid for no topic, so the answer tells nothing else.

A DENY entry hides topics beside a right to all of them. Who may Describe the cluster may list these entries, and ask
for their names, which the broker refuses if the entry applies to the client: by its principal and its host, which the
client may not know, unless it is a super user. A prefix is a name that the entry denies as well. Whether there is such
a topic stays unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from minibroker.client.administering.acls import bindings_of, request_of
from minibroker.client.errors import acl_commands
from minibroker.deploy.observing.cluster_view import ASK_TIMEOUT_S, ClusterView, ask
from minibroker.protocol.acls import (
    WILDCARD,
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    AclResourceType,
    PatternType,
    ResourcePattern,
)
from minibroker.protocol.apis import DESCRIBE_ACLS, METADATA
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import MetadataRequest, MetadataResponse
from minibroker.protocol.words import all_of

ALL_TOPICS = "*"
TOPICS = "--operation Describe --operation DescribeConfigs --topic '*'"
CONFIGS = "--operation DescribeConfigs --topic '*'"
CLUSTER = "--operation Describe --cluster"
UNKNOWN = {
    TOPICS: "the state of all topics that it does not see",
    CONFIGS: "which partitions have fewer replicas in sync than min.insync.replicas",
    CLUSTER: "log directories that are offline or slow, replicas that are being moved, slow followers, connections to "
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


DENIED = AclFilter(AclResourceType.TOPIC, permission=AclPermissionType.DENY)
_MOST_DENIED = 100
"""As many names of DENY entries are asked about."""


def names_denied(bindings: Iterable[AclBinding]) -> dict[str, ResourcePattern]:
    """Return the patterns of these DENY entries that may hide topics, by name. One for all topics is noticed by the
    answer about `ALL_TOPICS`."""
    found = {
        pattern.name: pattern
        for pattern, entry in bindings
        if entry.operation in (AclOperation.DESCRIBE, AclOperation.ALL) and pattern.name != WILDCARD
    }
    return {name: found[name] for name in sorted(found)[:_MOST_DENIED]}


def hides_topics(view: ClusterView) -> bool:
    return TOPICS in view.missing_rights or bool(view.hidden_topics)


async def with_missing_rights(view: ClusterView, timeout_s: float = ASK_TIMEOUT_S) -> ClusterView:
    """Add `missing_rights` and `hidden_topics`. All brokers have the same lists, so the first that answers is
    enough. Takes twice `timeout_s` at most for each broker."""
    request = MetadataRequest(
        [ALL_TOPICS], include_topic_authorized_operations=True, include_cluster_authorized_operations=True
    )
    for address in sorted(view.answered):
        answer, lists = await asyncio.gather(
            ask(view.access, address, METADATA, request, timeout_s),
            ask(view.access, address, DESCRIBE_ACLS, request_of(DENIED), timeout_s),
        )
        if answer is not None:
            denied = {} if lists is None else names_denied(bindings_of(lists))
            about_them = MetadataRequest(list(denied))
            refused = await ask(view.access, address, METADATA, about_them, timeout_s) if denied else None
            hidden = [
                denied[topic.name]
                for topic in (() if refused is None else refused.topics)
                if topic.error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
            ]
            return view._replace(missing_rights=tuple(missing(answer)), hidden_topics=tuple(map(_shown, hidden)))
    return view


def _shown(pattern: ResourcePattern) -> str:
    return f"{pattern.name}*" if pattern.pattern_type is PatternType.PREFIXED else pattern.name


def told(rights: Sequence[str], principal: str | None) -> str:
    """Return a sentence: what is unknown without these rights, and the remedy. `principal`: None if only the brokers
    know it."""
    unknown = "; ".join(UNKNOWN[options] for options in rights)
    return (
        f"{principal or 'this client'} may not see everything, so this is unknown: {unknown}: an administrator can "
        f"allow it with {acl_commands(principal, rights)}"
    )


def hidden(topics: Sequence[str], principal: str | None) -> str:
    """Return a sentence: which topics DENY entries hide, and the remedy."""
    return (
        f"{principal or 'this client'} may not Describe {all_of('topic', topics)}, so it is unknown if there are any, "
        "and their state: DENY entries hide them, which `minibroker acls list` shows"
    )
