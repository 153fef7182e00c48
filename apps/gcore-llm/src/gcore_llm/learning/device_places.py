"""Which GPUs of this machine training ranks have, and which are left to processes of engines."""

from collections.abc import Collection

from gcore_llm.config import TrainConfig
from gcore_placement import engine_order


def training_gpus(config: TrainConfig, count: int) -> set[int]:
    """Return the numbers of the GPUs, of ``count``, that the models in training are on."""
    trainer = config.trainer
    if trainer.num_processes == 1 and trainer.backend == "torch":
        _, _, number = config.device.partition(":")
        return {int(number or 0)}
    return {rank % count for rank in range(trainer.num_processes)}


def engine_gpus(
    count: int,
    num_engines: int,
    training: Collection[int],
    *,
    takes_turns: bool = False,
    first: int = 0,
) -> list[int]:
    """Return the number of the GPU of each of ``num_engines`` processes, of ``count``; see `engine_order`.

    Where processes are more than GPUs, they start again with the first one.

    Args:
        training: numbers of the GPUs with training ranks.
        first: processes of other engines that were placed before by the same rule.
    """
    order = engine_order(range(count), training, takes_turns=takes_turns)
    return [order[i % count] for i in range(first, first + num_engines)]
