"""Producer ids, and later the transaction coordinator."""
