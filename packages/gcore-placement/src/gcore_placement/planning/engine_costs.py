"""The costs of an engine, from its model's shape and a device's data sheet: a roofline (Williams et al. 2009)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gcore_placement.cluster import Cluster
from gcore_placement.costs import EngineCosts
from gcore_placement.planning.efficiency import Efficiency
from gcore_placement.planning.memory import kv_bytes_per_token
from gcore_placement.workload.lengths import Lengths
from gcore_placement.workload.model_shape import ModelShape

_FLOPS_PER_WEIGHT = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineLaws:
    """`EngineCosts` under several numbers of sequences at once: arrays are [num_laws]."""

    devices_per_replica: int
    max_num_seqs: NDArray[np.float64]
    decode_base_s: NDArray[np.float64]
    decode_per_sequence_s: NDArray[np.float64]
    decode_per_context_token_s: float
    prefill_per_token_s: float

    def costs(self, index: int) -> EngineCosts:
        """Return the law at an index."""
        return EngineCosts(
            devices_per_replica=self.devices_per_replica,
            max_num_seqs=int(self.max_num_seqs[index]),
            decode_base_s=float(self.decode_base_s[index]),
            decode_per_sequence_s=float(self.decode_per_sequence_s[index]),
            decode_per_context_token_s=self.decode_per_context_token_s,
            prefill_per_token_s=self.prefill_per_token_s,
        )


@dataclass(frozen=True, kw_only=True)
class EngineRoofline:
    """One replica of a model on `tp` devices of a cluster."""

    model: ModelShape
    cluster: Cluster
    tp: int
    compute_bytes: int
    efficiency: Efficiency

    def laws(self, max_num_seqs: NDArray[np.float64]) -> EngineLaws:
        """Return the replica's laws for several maxima of running sequences, each linear in the number that runs.

        A law goes through `decode_s` at one sequence and at its most. Between them `decode_s` of a dense model is at
        most as high; that of a mixture of experts can be higher, for few sequences meet many experts.
        """
        one_s = float(self.decode_s(np.ones(1))[0])
        per_sequence_s = (self.decode_s(max_num_seqs) - one_s) / np.maximum(1.0, max_num_seqs - 1)
        return EngineLaws(
            devices_per_replica=self.tp,
            max_num_seqs=max_num_seqs,
            decode_base_s=np.maximum(0.0, one_s - per_sequence_s),
            decode_per_sequence_s=per_sequence_s,
            decode_per_context_token_s=kv_bytes_per_token(self.model, self.tp, self.compute_bytes) * self._byte_s,
            prefill_per_token_s=self._products_s(self.efficiency.prefill) + self._sums_s,
        )

    def sequence_bytes(self, *, prompt_lengths: Lengths, response_lengths: Lengths) -> float:
        """Return the bytes of keys and values per running sequence on each device, at the worst moment of a step.

        Either all have started together, and the worst moment is when those that are left, times what they hold, are
        most; or sequences end and start steadily, and one caught at random has E[L^2] / 2 E[L] tokens of its response.
        """
        steady = prompt_lengths.mean + response_lengths.mean_square / (2 * response_lengths.mean)
        held = max(steady, response_lengths.most_alive(prompt_lengths.mean))
        return held * kv_bytes_per_token(self.model, self.tp, self.compute_bytes)

    def decode_s(self, num_seqs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of a step in which each sequence gets a token, without reading their keys and values.

        The weights are read (of experts, those that a token goes to) and multiplied by, see `Efficiency.overlap`; two
        sums over the devices in each layer; and the overhead of a step. The result has the shape of `num_seqs`.
        """
        reading_s = self.compute_bytes * self.model.parameters_read(num_seqs) / self.tp * self._byte_s
        computing_s = num_seqs * self._products_s(self.efficiency.decode)
        starts_s = 2 * self.model.workload.num_hidden_layers * self.efficiency.all_reduce_s if self.tp > 1 else 0.0
        overhead_s = self.efficiency.decode_step_s + num_seqs * self.efficiency.decode_sequence_s
        return self.efficiency.together_s(reading_s, computing_s) + starts_s + num_seqs * self._sums_s + overhead_s

    @property
    def _byte_s(self) -> float:
        return 1 / (self.cluster.device.memory_bytes_per_s * self.efficiency.memory)

    def _products_s(self, share: float) -> float:
        """Return the seconds of a token's matrix products."""
        flops = _FLOPS_PER_WEIGHT * self.model.num_multiplied_parameters
        return flops / (self.tp * self.cluster.device.flops_per_s * share)

    @property
    def _sums_s(self) -> float:
        """The seconds of a token's two sums in each layer, over a ring."""
        workload = self.model.workload
        size_bytes = 2 * workload.num_hidden_layers * workload.hidden_size * self.compute_bytes
        rate = self.cluster.link_bytes_per_s(self.tp) * self.efficiency.links
        return 2 * size_bytes * (self.tp - 1) / self.tp / rate
