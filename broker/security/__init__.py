"""Who may do what: the access control lists, their decisions, and the access that each API needs."""
