"""What `benchmarks/save.py` is made of."""
