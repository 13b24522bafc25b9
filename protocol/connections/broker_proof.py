"""Two brokers prove to each other that they belong to one cluster, by a shared secret that is never sent. Pure.

The problem: a broker obeys any control request with a high epoch, and any fetch may claim how far a replica has come.
Without a proof, any process that can reach the port could depose the controller, delete replicas, or have records
acknowledged that are not replicated (CVE-2018-1288).

The choice: a challenge and a response each way, by HMAC-SHA256. The connecting broker sends a nonce. The accepting
broker returns its own nonce and its proof. The connecting broker checks that proof and sends its own together with its
first request, so a connection costs one extra round trip. A proof covers both nonces, both broker ids and the side that
sends it: it is invalid on another connection, for another broker, or if it is sent back.

The limit: later requests are neither encrypted nor signed, so an attacker who can change packets between two brokers
can take over their connection. Only TLS prevents that.

Rejected: sending the secret (an impostor would receive it); SCRAM, as in Kafka, which is designed for weak passwords
that one side knows, and takes another round trip; a nonce from one side only (an old proof could be replayed to the
other).
"""

import hmac
import struct
from typing import NamedTuple

LEAST_SECRET_BYTES = 16

_IDS = struct.Struct(">ii")


class Handshake(NamedTuple):
    """The values that both sides of a connection know once the nonces have been exchanged."""

    connecting_id: int
    accepting_id: int
    connecting_nonce: bytes
    accepting_nonce: bytes

    def connecting_proof(self, secret: bytes) -> bytes:
        """Return the proof of the connecting broker."""
        return self._proof(secret, b"minibroker connecting")

    def accepting_proof(self, secret: bytes) -> bytes:
        """Return the proof of the accepting broker."""
        return self._proof(secret, b"minibroker accepting ")

    def _proof(self, secret: bytes, side: bytes) -> bytes:
        # Every part has a fixed length, so no two handshakes yield the same bytes.
        ids = _IDS.pack(self.connecting_id, self.accepting_id)
        return hmac.digest(secret, side + ids + self.connecting_nonce + self.accepting_nonce, "sha256")


def is_same(proof: bytes, expected: bytes) -> bool:
    """Return whether they are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(proof, expected)


def fingerprint(secret: bytes | None, cluster_id: str) -> str:
    """Return the value by which brokers see whether they have the same secret; empty: no secret. Like a proof, it may
    be public, since it does not reveal the secret."""
    return "" if secret is None else hmac.digest(secret, b"minibroker cluster " + cluster_id.encode(), "sha256").hex()
