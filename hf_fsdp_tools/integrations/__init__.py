"""Accelerate and the HF Trainer: the only room that imports accelerate, and the only one that reads its variables."""
