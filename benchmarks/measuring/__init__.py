"""What the benchmarks of loading and saving share: processes, rounds, figures against bars."""
