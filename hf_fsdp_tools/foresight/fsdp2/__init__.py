"""What FSDP2, clipping and the optimizer do, laid over the events of a model."""
