"""What `benchmarks/faults.py` does to saves, states, checkpoints and ranks."""
