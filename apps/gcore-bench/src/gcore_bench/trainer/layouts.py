"""How ranks divide a long sequence."""

from collections.abc import Sequence


def kinds(sizes: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Contenders: context-parallel size, and how many of these ranks exchange heads."""
    found: dict[str, tuple[int, int]] = {}
    for size in sizes:
        if size == 1:
            found["alone"] = (1, 1)
        else:
            found[f"ulysses-{size}"] = (size, size)
            found[f"ring-{size}"] = (size, 1)
    return found
