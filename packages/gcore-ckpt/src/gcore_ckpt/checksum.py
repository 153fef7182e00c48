"""The one checksum of the format: xxh3, 64 bits."""

import xxhash


def checksum(data: bytes | memoryview) -> str:
    """The checksum of `data` as it stands in an index: `xxh3_64:` and 16 hex digits."""
    digest = xxhash.xxh3_64()
    digest.update(data)  # the one-shot function would hold the GIL, and with it the training thread
    return f"xxh3_64:{digest.hexdigest()}"
