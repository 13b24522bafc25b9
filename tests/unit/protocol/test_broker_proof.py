from __future__ import annotations

from itertools import combinations

from minibroker.protocol.connections.broker_proof import Handshake, is_same

KEY, OTHER_KEY = b"a secret of the cluster", b"a secret of another one"
FIRST, SECOND = b"1" * 32, b"2" * 32


def test_a_proof_is_of_the_secret_both_brokers_both_nonces_and_the_side() -> None:
    handshakes = [
        Handshake(connecting, accepting, connecting_nonce, accepting_nonce)
        for connecting in (1, 2)
        for accepting in (1, 2)
        for connecting_nonce in (FIRST, SECOND)
        for accepting_nonce in (FIRST, SECOND)
    ]
    proofs = [
        proof
        for handshake in handshakes
        for key in (KEY, OTHER_KEY)
        for proof in (handshake.connecting_proof(key), handshake.accepting_proof(key))
    ]
    assert {len(proof) for proof in proofs} == {32}
    assert not any(is_same(one, other) for one, other in combinations(proofs, 2))


def test_both_brokers_come_to_the_same_proofs() -> None:
    one, other = Handshake(1, 2, FIRST, SECOND), Handshake(1, 2, FIRST, SECOND)
    assert is_same(one.connecting_proof(KEY), other.connecting_proof(KEY))
    assert is_same(one.accepting_proof(KEY), other.accepting_proof(KEY))
