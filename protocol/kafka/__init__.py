"""Kafka's own protocol: decodes its bytes to the structs of `protocol.messages` and encodes them. Pure."""
