"""FSDP2 applied to a plan, and to adapters in the units of their base."""
