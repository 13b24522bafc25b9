"""Kafka's own protocol, as its clients speak it: bytes to the messages of `protocol.messages`, and back. Pure."""
