"""The commands of `minibroker bench` that measure from the client: produce, consume, latency, durability."""
