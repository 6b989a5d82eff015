"""Quantised weights: recognised, dequantised or packed while they are read, or kept as they are stored."""
