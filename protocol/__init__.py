"""The wire protocol, record batches and znodes as data and pure functions, and the World.

I/O happens only in `connections` and `world.real`. Every other package may import this one.
"""
