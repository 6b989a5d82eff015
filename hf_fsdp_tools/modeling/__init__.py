"""A model before FSDP: build it on meta, read it as a tree, show it without adapters, and initialise its tensors."""
