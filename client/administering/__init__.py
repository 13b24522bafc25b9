"""Administrative requests, one module per family of calls."""
