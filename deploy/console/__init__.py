"""`minibroker console`: pages that show a cluster in a browser, live and read-only."""
