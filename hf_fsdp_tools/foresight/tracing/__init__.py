"""Dry runs: the real model on tensors without data gives the events of one micro-batch."""
