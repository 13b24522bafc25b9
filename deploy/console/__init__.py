"""`minibroker console`: pages that show a cluster in a browser, live, and break it if allowed."""
