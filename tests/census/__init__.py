"""Every model type that transformers registers, at a small size: planned, trained, kept quantised, streamed."""
