"""Tiny checkpoints and batches of every architecture of transformers, and what is compared with them."""
