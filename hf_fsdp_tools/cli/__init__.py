"""The command `hf-fsdp`."""
