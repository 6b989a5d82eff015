"""A model before FSDP: built on meta, read as a tree, seen without its adapters, with values that live in no file."""
