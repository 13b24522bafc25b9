"""The wire, the record batch and the znodes as data and pure functions; and the World, which is all that lies outside.

I/O happens in `rpc` and `world.real` alone; every other package may import this one.
"""
