"""What `benchmarks/load.py` is made of."""
