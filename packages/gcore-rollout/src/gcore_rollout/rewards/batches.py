"""Which sequences are computed together."""

from collections.abc import Sequence


def batches_by_length(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Indexes of sequences, shortest first, in batches that hold at most ``max_tokens`` with their padding.

    A sequence that is longer is a batch of its own.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        # The last one is the longest, so it sets what every row of the batch is padded to.
        if batches and (len(batches[-1]) + 1) * lengths[index] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
