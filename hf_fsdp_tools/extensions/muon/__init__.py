"""Muon: whole matrices are orthogonalised, each on the rank that owns it."""
