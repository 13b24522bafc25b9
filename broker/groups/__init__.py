"""The group coordinator: members of consumer groups, their generations, and the offsets that groups commit."""
