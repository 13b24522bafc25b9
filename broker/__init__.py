"""The broker: network, handlers, purgatory, replication, storage; composed in `broker`."""
