"""Shards into files: the layout of a checkpoint, saves that appear at once, adapters, training states, exports."""
