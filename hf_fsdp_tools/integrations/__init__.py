"""Accelerate and the HF Trainer on sharded models: the only room that imports accelerate and reads its variables."""
