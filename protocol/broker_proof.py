"""How two brokers prove to each other that they are of one cluster: by a secret which they share, and never send. Pure.

The problem: a broker obeys whoever gives it a control request with a high epoch, and believes a fetch that says how far
a replica has come. So whoever reaches its port could depose the controller, delete replicas, or have a producer told
that its records are safe (CVE-2018-1288).

The choice: a challenge and a response each way, by HMAC-SHA256. Who has connected sends a nonce; who was connected to
answers with its own nonce and its proof; the former sees who that is before it says anything more, and sends its proof
together with its first request, so a connection costs one round trip more than before. A proof is of both nonces, both
broker ids and the side that gives it: it is worth nothing on another connection, towards another broker, or sent back
to where it came from.

What it does not do: what is said afterwards is neither encrypted nor signed, so who can change packets between two
brokers can take over their connection. That takes TLS.

Rejected: sending the secret (whoever pretends to be a broker would have it); SCRAM, Kafka's way, which is made for
passwords that are weak and known to one side alone, and takes a round trip more; a nonce of one side only (an old proof
could be played back to the other).
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
        """What the broker that has connected proves itself by."""
        return self._proof(secret, b"minibroker connecting")

    def accepting_proof(self, secret: bytes) -> bytes:
        """What the broker that was connected to proves itself by."""
        return self._proof(secret, b"minibroker accepting ")

    def _proof(self, secret: bytes, side: bytes) -> bytes:
        # Every part has a fixed length, so no two handshakes make the same bytes.
        ids = _IDS.pack(self.connecting_id, self.accepting_id)
        return hmac.digest(secret, side + ids + self.connecting_nonce + self.accepting_nonce, "sha256")


def is_same(proof: bytes, expected: bytes) -> bool:
    """Takes as long whatever the difference is."""
    return hmac.compare_digest(proof, expected)
