"""The flat-parameter path of FSDP1, deprecated upstream, in a room of its own so that it can be deleted one day."""
