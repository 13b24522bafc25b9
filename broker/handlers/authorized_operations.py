"""The operations that a client may perform on a topic, a group and the cluster (KIP-430). Without ACLs, these are all
supported ones (Kafka's AclEntry.supportedOperations)."""

from enum import IntEnum


class AclOperation(IntEnum):
    """Kafka's codes."""

    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


def _bits(*operations: AclOperation) -> int:
    """Return the operations as in Kafka's protocol: bit N for operation N."""
    return sum(1 << operation for operation in operations)


_O = AclOperation

ON_TOPIC = _bits(_O.READ, _O.WRITE, _O.CREATE, _O.DELETE, _O.ALTER, _O.DESCRIBE, _O.DESCRIBE_CONFIGS, _O.ALTER_CONFIGS)
ON_GROUP = _bits(_O.READ, _O.DESCRIBE, _O.DELETE)
ON_CLUSTER = _bits(
    _O.CREATE,
    _O.ALTER,
    _O.DESCRIBE,
    _O.CLUSTER_ACTION,
    _O.DESCRIBE_CONFIGS,
    _O.ALTER_CONFIGS,
    _O.IDEMPOTENT_WRITE,
)
