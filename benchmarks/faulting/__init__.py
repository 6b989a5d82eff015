"""What `benchmarks/faults.py` does to saves."""
