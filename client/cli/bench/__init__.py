"""The commands of `minibroker bench` that measure from a client's side: produce, consume, latency, durability."""
