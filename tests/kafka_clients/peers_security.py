"""Listeners with TLS and SASL, users and tokens for the suites of `peers`.

Each broker has four listeners: PLAINTEXT, SSL, SASL_PLAINTEXT and SASL_SSL. Those with SASL accept PLAIN,
SCRAM-SHA-256, SCRAM-SHA-512 and OAUTHBEARER.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

from minibroker import UserScramCredentialUpsertion, sync
from minibroker.deploy.local.certificates import Certificates
from minibroker.deploy.local.cluster_file import BrokerEntry
from minibroker.deploy.local.ports import LOOPBACK

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512")
KEY_ID = "one"


class User(NamedTuple):
    name: str
    plain: str
    """The password for PLAIN."""
    scram: tuple[str, str]
    """The passwords for SCRAM-SHA-256 and SCRAM-SHA-512."""


USERS = (
    User("alice", "alice-secret", ("alice-secret", "alice-secret")),  # of kafka-python
    User("adminplain", "admin-secret", ("admin-secret", "admin-secret")),  # of kafka-go
    User("adminscram", "admin-secret", ("admin-secret-256", "admin-secret-512")),  # of kafka-go
)


class Listeners(NamedTuple):
    """The ports of each broker, in the order of PROTOCOLS."""

    ports: Sequence[Sequence[int]]

    def bootstrap(self, protocol: str) -> str:
        at = PROTOCOLS.index(protocol)
        return ",".join(f"{LOOPBACK}:{ports[at]}" for ports in self.ports)

    def brokers(self, first: int) -> tuple[BrokerEntry, ...]:
        """Brokers with ids from `first` on."""
        return tuple(
            BrokerEntry(number, ports[0], settings={"listeners": _listeners(ports)})
            for number, ports in enumerate(self.ports, first)
        )


def _listeners(ports: Sequence[int]) -> str:
    named = [f"{protocol}://{LOOPBACK}:{port}" for protocol, port in zip(PROTOCOLS, ports, strict=True)]
    return ",".join([*named, f"CONTROLLER://{LOOPBACK}:0"])


class Security:
    """Certificates, users and keys in the directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.certificates = Certificates(directory / "certificates")
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        public: dict[str, Any] = jwt.algorithms.RSAAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        self._keys = directory / "keys.json"
        self._keys.write_text(json.dumps({"keys": [{**public, "kid": KEY_ID, "use": "sig"}]}))

    def settings(self) -> dict[str, str]:
        """The settings of brokers."""
        users = " ".join(f'user_{user.name}="{user.plain}"' for user in USERS)
        login = f"org.apache.kafka.common.security.plain.PlainLoginModule required {users};"
        settings = {
            "sasl.enabled.mechanisms": ",".join(["PLAIN", *MECHANISMS, "OAUTHBEARER"]),
            "sasl.oauthbearer.jwks.endpoint.url": self._keys.as_uri(),
        }
        for listener in ("sasl_plaintext", "sasl_ssl"):
            settings[f"listener.name.{listener}.plain.sasl.jaas.config"] = login
        return {**self.certificates.settings(), **settings}

    def token(self, subject: str, lifetime_s: int) -> str:
        """A signed token that ends `lifetime_s` from now; negative: that has ended."""
        claims = {"sub": subject, "exp": int(time.time()) + lifetime_s}
        return jwt.encode(claims, self._key, algorithm="RS256", headers={"kid": KEY_ID})


def add_users(bootstrap: str) -> None:
    """Set the passwords for SCRAM."""
    changes = [
        UserScramCredentialUpsertion(user.name, mechanism, password)  # type: ignore[arg-type]
        for user in USERS
        for mechanism, password in zip(MECHANISMS, user.scram, strict=True)
    ]
    with sync.Admin(bootstrap) as admin:
        for change in changes:
            admin.alter_user_scram_credentials([change])
