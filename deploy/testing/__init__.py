"""A cluster inside a test: its public face is `minibroker.testing`.

File map: cluster.py is the cluster and what can be done to it, isolation.py how brokers are cut off, plugin.py the
fixtures of pytest, guardian.py the process that takes the cluster down where the test run cannot. Nothing is imported
here, since pytest imports the plugin in every run, and most runs have no use for a cluster.
"""
