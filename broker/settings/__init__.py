"""Every setting of brokers and topics, and how it changes while the broker runs."""
