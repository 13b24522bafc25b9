"""The broker: network, handlers, purgatory, replication, storage; composed in `__main__`."""
