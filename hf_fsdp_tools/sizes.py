"""Sizes as people read them: decimal units, one decimal."""

__all__ = ["show_bytes", "show_count"]


def show_bytes(num_bytes: int) -> str:
    """1234567 as "1.2 MB"."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} B"


def show_count(count: int) -> str:
    """1234567 parameters as "1.2 M"."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:,.1f} {letter}"
    return str(count)
