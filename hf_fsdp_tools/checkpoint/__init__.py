"""Checkpoint files into shards and back, each rank its own bytes."""
