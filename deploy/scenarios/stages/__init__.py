"""The clusters that scenarios run on: simulated ones, processes of this machine, and containers."""
