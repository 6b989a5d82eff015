"""What the benchmarks of loading, saving and training share: processes, rounds, pages of tables."""
