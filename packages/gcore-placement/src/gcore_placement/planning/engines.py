"""The engines that a role may have: their costs by a roofline (Williams et al. 2009), sequences and seconds."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from gcore_placement.cluster import Cluster, Efficiency
from gcore_placement.costs import EngineLaws
from gcore_placement.errors import PlacementError
from gcore_placement.forecast import generation_seconds, last_judgement_s, reward_seconds
from gcore_placement.planning.layouts import Setting, engine_sizes, engine_weights, engine_workspace, kv_bytes_per_token
from gcore_placement.workload.job import Job, Lengths
from gcore_placement.workload.transformer import ModelShape

_FLOPS_PER_WEIGHT = 2


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


_MEMORY_STEPS = 128
"""Free memory is rounded down to this share of a device's, so that few tables serve all layouts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Engines:
    """Engines of one size on 1, 2, ... replicas. Arrays end in that axis, [num_replicas]."""

    tp: int
    most_num_seqs: int
    """Most sequences that the memory of each engine holds."""
    weights_bytes: float
    """Bytes on each device, as all bytes here."""
    workspace_bytes: float
    kv_sequence_bytes: float
    """Keys and values of a running sequence."""
    longest_bytes: float
    """Keys and values of the longest sequence."""
    laws: EngineLaws
    waves_s: NDArray[np.float64]
    """[num_waves, num_replicas] seconds."""
    last_s: NDArray[np.float64]
    """Seconds of the last judgement; 0 for a policy."""


class EngineOptions:
    """The engines that one role may have: the judge, or the policy."""

    def __init__(self, setting: Setting, *, is_judge: bool) -> None:
        self.model, self.prompt_lengths, self.response_lengths = _role(setting.job, is_judge=is_judge)
        self._setting, self._is_judge = setting, is_judge
        self._sizes = engine_sizes(self.model, setting.cluster, setting.cluster.num_devices)
        self._engines = cache(self._build)

    def of(self, num_devices: int, free_bytes: float) -> list[Engines]:
        """Return the engines that fit into the free memory of so many devices, smallest first."""
        steps = int(free_bytes / self._setting.cluster.device.memory_bytes * _MEMORY_STEPS)
        found = [self._engines(tp, steps) for tp in self._sizes if tp <= num_devices]
        return [engines for engines in found if engines is not None]

    def least_bytes(self, tp: int) -> float:
        """Return the bytes that each device of an engine needs: weights, workspace, and the longest sequence."""
        compute_bytes = self._setting.job.compute_bytes
        weights_bytes = engine_weights(self.model, tp, compute_bytes)
        return weights_bytes + engine_workspace(self.model, tp, compute_bytes) + self._longest_bytes(tp)

    def _longest_bytes(self, tp: int) -> float:
        longest = self.prompt_lengths.longest + self.response_lengths.longest
        return longest * kv_bytes_per_token(self.model, tp, self._setting.job.compute_bytes)

    def sizes(self, num_devices: int) -> list[int]:
        """Return all tensor-parallel sizes, including those that do not fit."""
        return [tp for tp in self._sizes if tp <= num_devices]

    def _build(self, tp: int, memory_steps: int) -> Engines | None:
        job, cluster, compute_bytes = self._setting.job, self._setting.cluster, self._setting.job.compute_bytes
        free_bytes = memory_steps / _MEMORY_STEPS * cluster.device.memory_bytes
        efficiency = self._setting.efficiency
        roofline = EngineRoofline(
            model=self.model, cluster=cluster, tp=tp, compute_bytes=compute_bytes, efficiency=efficiency
        )
        weights_bytes = engine_weights(self.model, tp, compute_bytes)
        workspace_bytes = engine_workspace(self.model, tp, compute_bytes)
        held = roofline.sequence_bytes(prompt_lengths=self.prompt_lengths, response_lengths=self.response_lengths)
        most = min(self._setting.most_num_seqs, int((free_bytes - weights_bytes - workspace_bytes) / held))
        if most < 1 or free_bytes < self.least_bytes(tp):
            return None
        replicas = np.arange(1, cluster.num_devices // tp + 1, dtype=np.float64)
        # No engine is sized for more sequences than it gets.
        each = np.ceil(job.wave_prompts.max() * job.n / replicas)
        stage, seconds = ("reward", reward_seconds) if self._is_judge else ("generation", generation_seconds)
        laws = self._setting.correction.engine(stage, roofline.laws(np.clip(each, 1, most)))
        return Engines(
            tp=tp,
            most_num_seqs=most,
            weights_bytes=weights_bytes,
            workspace_bytes=workspace_bytes,
            kv_sequence_bytes=held,
            longest_bytes=self._longest_bytes(tp),
            laws=laws,
            waves_s=seconds(laws, job, replicas),
            last_s=last_judgement_s(laws, job) if self._is_judge else np.zeros(replicas.size),
        )


def _role(job: Job, *, is_judge: bool) -> tuple[ModelShape, Lengths, Lengths]:
    if not is_judge:
        return job.policy, job.prompt_lengths, job.response_lengths
    if job.judge is None or job.judge_prompt_lengths is None or job.judge_lengths is None:
        raise PlacementError("job.judge is None; expected a model, for engines of a judge")
    return job.judge, job.judge_prompt_lengths, job.judge_lengths
