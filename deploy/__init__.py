"""The local launcher: one ZooKeeper and N brokers as processes of this machine, and commands that break them."""
