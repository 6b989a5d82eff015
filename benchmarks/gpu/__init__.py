"""What `benchmarks/gpu.sh` runs: `steps` says what, `run` runs it, `page` writes it down; the rest measures."""
