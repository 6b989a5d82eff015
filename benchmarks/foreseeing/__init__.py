"""What `benchmarks/foresight.py` runs: real trainings whose memory is counted, beside what was estimated."""
