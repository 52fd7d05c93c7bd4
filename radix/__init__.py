"""Which prefixes and which states to keep."""
