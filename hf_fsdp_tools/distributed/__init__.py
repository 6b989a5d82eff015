"""Which processes share what, and how they agree: parallel degrees, the device mesh, and outcomes that all ranks learn
of."""
