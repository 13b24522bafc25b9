"""Kafka's own protocol: its bytes to the messages of `protocol.messages`, and back. Pure."""
