"""How two brokers prove to each other that they belong to one cluster: by a secret that they share, and never send.
Pure.

The problem: a broker obeys any control request with a high epoch, and believes any fetch that says how far a replica
has come. So anybody who can reach its port could depose the controller, delete replicas, or have a producer told that
its records are safe (CVE-2018-1288).

The choice: a challenge and a response each way, by HMAC-SHA256. The connecting broker sends a nonce; the accepting one
answers with its own nonce and its proof; the connecting one checks that before it says anything more, and sends its own
proof together with its first request, so a connection costs one extra round trip. A proof covers both nonces, both
broker ids and the side that gives it: it is worth nothing on another connection, towards another broker, or sent back
to its sender.

What it does not do: what follows is neither encrypted nor signed, so anybody who can change packets between two brokers
can take over their connection. Preventing that takes TLS.

Rejected: sending the secret (anybody who pretends to be a broker would have it); SCRAM, Kafka's way, which is made for
passwords that are weak and known to one side only, and takes another round trip; a nonce from one side only (an old
proof could be replayed to the other).
"""

import hmac
import struct
from typing import NamedTuple

LEAST_SECRET_BYTES = 16

_IDS = struct.Struct(">ii")


class Handshake(NamedTuple):
    """What both sides of a connection know once the nonces have been exchanged."""

    connecting_id: int
    accepting_id: int
    connecting_nonce: bytes
    accepting_nonce: bytes

    def connecting_proof(self, secret: bytes) -> bytes:
        """The proof of the broker that has connected."""
        return self._proof(secret, b"minibroker connecting")

    def accepting_proof(self, secret: bytes) -> bytes:
        """The proof of the broker that was connected to."""
        return self._proof(secret, b"minibroker accepting ")

    def _proof(self, secret: bytes, side: bytes) -> bytes:
        # Every part has a fixed length, so no two handshakes yield the same bytes.
        ids = _IDS.pack(self.connecting_id, self.accepting_id)
        return hmac.digest(secret, side + ids + self.connecting_nonce + self.accepting_nonce, "sha256")


def is_same(proof: bytes, expected: bytes) -> bool:
    """Whether they are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(proof, expected)


def fingerprint(secret: bytes | None, cluster_id: str) -> str:
    """By which brokers of a cluster see whether they have the same secret; empty: none at all. It may be known to
    everybody, as a proof may: neither tells the secret."""
    return "" if secret is None else hmac.digest(secret, b"minibroker cluster " + cluster_id.encode(), "sha256").hex()
