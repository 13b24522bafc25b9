"""The wire protocol, the record batch and the znodes as data and pure functions; and the World, which is everything
outside the process.

I/O happens only in `rpc`, `broker_connections` and `world.real`; every other package may import this one.
"""
