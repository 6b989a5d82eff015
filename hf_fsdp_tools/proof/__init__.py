"""Whether a layout computes what one process computes: a tiny model of the same kind, on CPU ranks and alone."""
