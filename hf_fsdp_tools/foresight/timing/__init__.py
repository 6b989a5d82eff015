"""How long events take on GPUs and links."""
