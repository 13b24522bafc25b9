"""The states of partitions and replicas, which moves are legal, and the checker. Pure."""
