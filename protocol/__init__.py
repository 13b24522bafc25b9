"""The wire, the record batch, the znodes and the World: data and pure functions.

I/O happens in `rpc` and `real_world` alone; every other package may import this one.
"""
