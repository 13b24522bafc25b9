"""The blocking clients, for scripts and threads; their public name is `minibroker.sync`."""
