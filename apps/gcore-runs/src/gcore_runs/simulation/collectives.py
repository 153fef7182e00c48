"""The seconds that links, bubbles and updates add to the products of training on a simulated cluster."""

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from gcore_placement import Efficiency, TransformerWorkload, gather_seconds
from gcore_runs.simulation.config import BaseSimConfig

_BFLOAT16 = 2
_FLOAT32 = 4
_UPDATE_TRAFFIC_BYTES = 28
"""AdamW reads weight, gradient and two moments in float32, and writes all but the gradient."""
_TENSOR_GATHERS = 4
_CONTEXT_GATHERS = 1.5
"""Gathers or scatters of a layer in a pass: of states with sequence parallelism; of keys and values, in the backward
pass with their gradients."""


@dataclass(frozen=True, kw_only=True)
class TrainingCollectives:
    """The seconds that a training step takes in addition to its products, on one replica; 0: they are not modelled."""

    token_pass_s: float = 0.0
    """Seconds of a token in a pass, forward or backward: tensor and context parallelism, and stages' borders."""
    weights_s: float = 0.0
    """Seconds to gather all weights (ZeRO-3), once in a pass; products hide them as far as these last."""
    gradients_s: float = 0.0
    """Seconds to scatter all gradients in a micro-batch (ZeRO-3), hidden as well."""
    update_s: float = 0.0
    """Seconds of an update: AdamW's traffic, and with ZeRO-1 the gradients' scatter and the weights' gather."""
    pipeline_stages: int = 1

    def seconds(
        self, products_s: NDArray[np.float64], tokens: NDArray[np.float64], *, is_training: bool
    ) -> NDArray[np.float64]:
        """Return the seconds of micro-batches with such products and tokens: [num_micro_batches]."""
        passes = 1
        hidden_s = self.weights_s
        if is_training:
            passes = 2
            hidden_s = passes * self.weights_s + self.gradients_s
        return np.maximum(products_s, hidden_s) + passes * self.token_pass_s * tokens

    def replica_s(self, micro_batches_s: NDArray[np.float64]) -> float:
        """Return the seconds of a replica: of its micro-batches, and of its pipeline's bubble.

        Of m micro-batches through p stages the bubble is (p - 1) / m of the work (Narayanan et al. 2021, arXiv
        2104.04473, section 2.2.1).
        """
        bubble = (self.pipeline_stages - 1) / max(1, len(micro_batches_s))
        return float(micro_batches_s.sum()) * (1 + bubble)


def training_collectives(
    config: BaseSimConfig, weights_bytes: float, workload: TransformerWorkload | None
) -> TrainingCollectives:
    """Return the collectives of a cluster's training, by the planner's laws (see `gcore_placement.plan`).

    Args:
        weights_bytes: of all weights in bfloat16.
        workload: the model's layers; None: it has no collectives by the token.
    """
    learner = config.learner
    cluster = config.cluster
    efficiency = Efficiency()
    if not learner.has_collectives:
        return TrainingCollectives()
    tp, pp, cp = learner.sizes
    num_devices = config.devices
    parameters = weights_bytes / _BFLOAT16
    own_parameters = parameters / (tp * pp)
    num_sharing = num_devices // (tp * pp)
    memory_rate = cluster.device.memory_bytes_per_s * efficiency.memory
    update_s = _UPDATE_TRAFFIC_BYTES * own_parameters / num_sharing / memory_rate
    layers = workload.num_hidden_layers if workload else 1
    gather_s = partial(gather_seconds, cluster, efficiency)

    token_pass_s = 0.0
    if workload:
        state_bytes = _BFLOAT16 * workload.hidden_size
        kv_bytes = _BFLOAT16 * workload.key_value_size
        # Of a token's layers each rank of a replica has its stage's, and of its tokens those of its context.
        tensor_s = _TENSOR_GATHERS * gather_s(state_bytes, tp, count=0) / cp
        context_s = _CONTEXT_GATHERS * gather_s(kv_bytes, cp, span=tp * cp, count=0) / tp
        # The ranks of one stage send to those of the next, but for the last.
        borders_s = gather_s(state_bytes, pp, span=tp * cp * pp, count=0) / (tp * cp)
        token_pass_s = layers / pp * (tensor_s + context_s) + borders_s
    if learner.backend == "torch":
        return TrainingCollectives(
            token_pass_s=token_pass_s,
            weights_s=gather_s(weights_bytes, num_devices, count=layers),
            gradients_s=gather_s(_FLOAT32 * parameters, num_devices, count=layers),
            update_s=update_s,
        )
    moved_s = gather_s(
        (_FLOAT32 + _BFLOAT16) * own_parameters, num_sharing, span=num_devices, count=2
    )
    return TrainingCollectives(
        token_pass_s=token_pass_s, update_s=update_s + moved_s, pipeline_stages=pp
    )
