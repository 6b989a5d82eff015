"""4-bit weights, packed while they are read."""
