"""The states of partitions and replicas, the legal moves, and the checker. Pure."""
