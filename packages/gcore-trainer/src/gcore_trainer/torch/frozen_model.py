"""A model that only scores: a reference policy, or a reward model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.sample import MicroBatch, by_sample
from gcore_trainer.torch.host_memory import Sleeper
from gcore_trainer.torch.packed_model import PackedTransformer
from gcore_trainer.torch.parallel import TorchParallel
from gcore_trainer.trainer import Replicas


class FrozenModel:
    """A `PackedModel` or `PackedValueModel` without gradients and moments, in one process or sharded over many.

    Args:
        parallel: the ranks among which parameters and samples are divided; None: this process is alone.

    Example:
        >>> reference = FrozenModel(PackedModel.from_pretrained("model"))
        >>> sample = Sample(prompt_ids=np.array([1, 5]), response_ids=np.array([8, 9, 2]))
        >>> scores = reference.scores([[sample], [sample, sample]])
        >>> [len(micro_batch) for micro_batch in scores]
        [1, 2]
    """

    def __init__(
        self, packed: PackedTransformer[Any], *, parallel: TorchParallel | None = None
    ) -> None:
        self._packed = packed
        self._replicas = Replicas(parallel.replicas if parallel else None)
        self.data_parallel_rank = self._replicas.rank
        """The replica that this rank belongs to."""
        self.data_parallel_size = self._replicas.size
        """Replicas, each with samples of its own."""
        packed.model.eval().requires_grad_(False)
        if parallel is not None:
            parallel.shard(packed)
        packed.load_weights()
        self._sleeper = Sleeper(packed.model)

    def sleep(self) -> None:
        """Free the device's memory of the parameters until `wake`; any other call is then a `TrainerError`."""
        self._sleeper.sleep()

    def wake(self) -> None:
        """Undo `sleep`, if this model is asleep."""
        self._sleeper.wake()

    def scores(self, micro_batches: Sequence[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """Compute log-probabilities or values [R] of each sample; another replica may have more micro-batches."""
        self._sleeper.check_awake()
        num_passes = max(self._replicas.gather(len(micro_batches)))
        return by_sample(self._packed.predict(micro_batches, num_passes), micro_batches)
