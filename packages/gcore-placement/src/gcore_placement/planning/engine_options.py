"""The engines that a role may have: for each size and memory, their sequences and their seconds."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gcore_placement.cluster import Cluster
from gcore_placement.correction import Correction
from gcore_placement.errors import PlacementError
from gcore_placement.planning.efficiency import Efficiency
from gcore_placement.planning.engine_costs import EngineLaws, EngineRoofline
from gcore_placement.planning.layouts import engine_sizes
from gcore_placement.planning.memory import engine_weights, engine_workspace, kv_bytes_per_token
from gcore_placement.planning.step_time import generation_seconds, last_judgement_s, reward_seconds
from gcore_placement.workload.job import Job
from gcore_placement.workload.lengths import Lengths
from gcore_placement.workload.model_shape import ModelShape

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
    """The engines that one role may have.

    Args:
        is_judge: the role is the judge; else the policy.
        most_num_seqs: most sequences of an engine at once.
    """

    def __init__(
        self,
        job: Job,
        *,
        is_judge: bool,
        cluster: Cluster,
        efficiency: Efficiency,
        correction: Correction,
        most_num_seqs: int,
    ) -> None:
        model, prompts, responses = _role(job, is_judge=is_judge)
        self.model = model
        self.prompt_lengths, self.response_lengths = prompts, responses
        self._job = job
        self._is_judge = is_judge
        self._cluster = cluster
        self._efficiency = efficiency
        self._correction = correction
        self._most_num_seqs = most_num_seqs
        self._sizes = engine_sizes(model, cluster, cluster.num_devices)
        self._known: dict[tuple[int, int], Engines | None] = {}

    def of(self, num_devices: int, free_bytes: float) -> list[Engines]:
        """Return the engines that fit into the free memory of so many devices, smallest first."""
        steps = int(free_bytes / self._cluster.device.memory_bytes * _MEMORY_STEPS)
        found = [self._engines(tp, steps) for tp in self._sizes if tp <= num_devices]
        return [engines for engines in found if engines is not None]

    def least_bytes(self, tp: int) -> float:
        """Return the bytes that each device of an engine needs: weights, workspace, and the longest sequence."""
        weights = engine_weights(self.model, tp, self._job.compute_bytes)
        return weights + engine_workspace(self.model, tp, self._job.compute_bytes) + self._longest_bytes(tp)

    def _longest_bytes(self, tp: int) -> float:
        longest = self.prompt_lengths.longest + self.response_lengths.longest
        return longest * kv_bytes_per_token(self.model, tp, self._job.compute_bytes)

    def sizes(self, num_devices: int) -> list[int]:
        """Return all tensor-parallel sizes, including those that do not fit."""
        return [tp for tp in self._sizes if tp <= num_devices]

    def _engines(self, tp: int, memory_steps: int) -> Engines | None:
        if (tp, memory_steps) not in self._known:
            free_bytes = memory_steps / _MEMORY_STEPS * self._cluster.device.memory_bytes
            self._known[tp, memory_steps] = self._build(tp, free_bytes)
        return self._known[tp, memory_steps]

    def _build(self, tp: int, free_bytes: float) -> Engines | None:
        job, compute_bytes = self._job, self._job.compute_bytes
        roofline = EngineRoofline(
            model=self.model, cluster=self._cluster, tp=tp, compute_bytes=compute_bytes, efficiency=self._efficiency
        )
        weights_bytes = engine_weights(self.model, tp, compute_bytes)
        workspace_bytes = engine_workspace(self.model, tp, compute_bytes)
        held = roofline.sequence_bytes(prompt_lengths=self.prompt_lengths, response_lengths=self.response_lengths)
        most = min(self._most_num_seqs, int((free_bytes - weights_bytes - workspace_bytes) / held))
        if most < 1 or free_bytes < self.least_bytes(tp):
            return None
        replicas = np.arange(1, self._cluster.num_devices // tp + 1, dtype=np.float64)
        # No engine is sized for more sequences than it gets.
        each = np.ceil(job.wave_prompts.max() * job.n / replicas)
        laws = self._correction.engine(
            "reward" if self._is_judge else "generation", roofline.laws(np.clip(each, 1, most))
        )
        seconds = reward_seconds if self._is_judge else generation_seconds
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
