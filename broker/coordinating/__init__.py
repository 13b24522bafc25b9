"""What the coordinators of groups and of transactions share: terms, the fields of records, and the clock of ageing."""
