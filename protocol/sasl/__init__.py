"""SASL: how clients prove who they are (RFC 4422). Pure; both sides use it."""
