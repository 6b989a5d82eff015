"""What a training step will need and how long it will take, before a GPU is touched."""
