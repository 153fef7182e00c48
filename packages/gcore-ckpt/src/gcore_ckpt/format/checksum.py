"""The one checksum of the format: xxh3, 64 bits, of each block of a shard, so that a part can be read and checked."""

import xxhash

BLOCK_BYTES = 4 << 20
"""Size of the blocks that this version writes; the last of a shard may be shorter."""

DIGITS = 16
"""Hex digits of a block's checksum. Those of a shard's blocks stand one after another."""

PREFIX = "xxh3_64:"


def digest(data: bytes | memoryview) -> str:
    """Return the hex digits of the checksum of `data`."""
    hasher = xxhash.xxh3_64()
    hasher.update(data)  # the one-shot function would hold the GIL, and with it the training thread
    return hasher.hexdigest()


def checksum(data: bytes | memoryview) -> str:
    """Return the checksum of `data` with the name of its kind before it."""
    return f"{PREFIX}{digest(data)}"


def block_count(size_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks of a shard."""
    return -(-size_bytes // block_bytes)
