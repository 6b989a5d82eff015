"""Shard models by a plan with FSDP2, and adapters in the units of their base."""
