"""A cluster inside a test; its public name is `minibroker.testing`.

Nothing is imported here: pytest imports the plugin in every run, and most runs need no cluster.
"""
