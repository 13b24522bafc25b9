"""Whole clusters in one process on virtual time: hosts, network, disks and ZooKeeper, repeatable by a seed."""
