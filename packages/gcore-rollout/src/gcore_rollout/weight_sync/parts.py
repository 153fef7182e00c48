"""The division of a model's weights over the ranks that send them: whole tensors, about as many bytes by each rank."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from gcore_rollout.weight_sync.layout import Layout, Packing


def divide_weights(
    weights: Iterable[tuple[str, torch.Tensor]], *, rank: int, num_ranks: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights that all ranks have one at a time, those that other ranks send on the meta device.

    The rank with the fewest bytes so far sends the next tensor: all ranks iterate over the same tensors in the same
    order, and so divide them alike.
    """
    sent_bytes = [0] * num_ranks
    for name, tensor in weights:
        sender = min(range(num_ranks), key=sent_bytes.__getitem__)
        sent_bytes[sender] += tensor.nbytes
        if sender != rank:
            tensor = tensor.to("meta")
        yield name, tensor


def write_part(weights: Iterable[tuple[str, torch.Tensor]], path: Path) -> tuple[Layout, int]:
    """Write the tensors that are not on the meta device to a file, each to its place in the layout of all.

    Returns:
        The layout, and the size of the file in bytes once all ranks have written.
    """
    packing = Packing()
    with path.open("r+b", buffering=0) as file:
        for name, tensor in weights:
            start = packing.place(name, tensor)
            if not tensor.is_meta and tensor.nbytes:
                flat = tensor.detach().cpu().contiguous().view(-1)
                data = flat.view(torch.uint8).numpy().data
                while data:
                    written = os.pwrite(file.fileno(), data, start)
                    data = data[written:]
                    start += written
    return packing.layout, packing.size_bytes
