"""The settings of brokers whose values are credentials: not shown, stored in ZooKeeper or given on command lines."""

import re

SENSITIVE = frozenset(
    {
        "broker.secret",
        "plain.sasl.jaas.config",
        "ssl.key.password",
        "ssl.keystore.certificate.chain",
        "ssl.keystore.key",
        "ssl.truststore.certificates",
    }
)
"""Settings whose values are not shown. Kafka hides these, too."""
_LIKE_SECRETS = ("jaas.config", "password", "secret")
"""The ends of names whose values are credentials."""
_OF_USERS = "scram-sha-"
"""The beginning of the names of users' passwords, which a request may set for a broker by mistake."""
_LISTENER_PREFIX = re.compile(r"listener\.name\.[^.]*\.")


def of_all_listeners(name: str) -> str:
    """Return the name without the prefix of a single listener."""
    return _LISTENER_PREFIX.sub("", name)


def is_credential(name: str) -> bool:
    """Return whether the setting's value is a secret, for one listener or for all. The names of plug-ins count."""
    bare = of_all_listeners(name)
    lower = bare.lower()
    return bare in SENSITIVE or lower.endswith(_LIKE_SECRETS) or lower.startswith(_OF_USERS)
