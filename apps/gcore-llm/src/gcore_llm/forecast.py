"""Predicted seconds of a run's steps by the planner's laws, corrected by measurements; kept in `placement.json`."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

from gcore_llm.config import TrainConfig
from gcore_llm.learning.trainer_worker import has_critic, has_reference
from gcore_placement import (
    Cluster,
    Correction,
    Device,
    Job,
    Lengths,
    ModelShape,
    Stage,
    StepTime,
    Strategy,
    plan,
    predict_step,
    strategy_traits,
)
from gcore_runs.run_folder import write_atomically

_CORE = Device(
    name="CPU core",
    memory_bytes=1e12,
    flops_per_s=5e10,
    memory_bytes_per_s=1e10,
    link_bytes_per_s=1e10,
    host_bytes_per_s=1e10,
)
"""Rough numbers, with memory that holds any model that runs: measurements correct the rest."""

_MOST = 1e6
"""Largest correction, for devices without a data sheet and models too small to be limited by arithmetic."""

_MEASURED: Mapping[Stage, str] = {
    "generation": "timing_s/gen",
    "reward": "timing_s/reward",
    "preparation": "timing_s/prepare",
    "training": "timing_s/train",
    "weight_sync": "timing_s/sync",
}


class Forecast:
    """Predicts each step of a run from its sampled lengths, and corrects the laws by the measured seconds.

    Devices are those of the planner's data sheets, or CPU cores. `gcore-placement plan --correction RUN` uses the
    corrections for plans of other jobs.

    Args:
        config: of the run, at its full size.
        model: the policy's folder.
        path: file of the corrections; it is read if it exists.

    Raises:
        PlacementError: the planner does not know such a model, or the file is damaged.
    """

    def __init__(self, config: TrainConfig, model: Path, path: Path) -> None:
        self._path = path
        self._correction = Correction(most=_MOST)
        if path.exists():
            self._correction.load_state(Correction.load(path).state())
        self._config = config
        judge = Path(config.reward_model.path) if config.sizes.judges else None
        self._job = Job(
            policy=_shape(model),
            prompt_lengths=Lengths.recorded([config.data.max_prompt_length]),
            response_lengths=Lengths.recorded([config.data.max_response_length]),
            train_batch_size=config.data.train_batch_size,
            n=config.rollout.n,
            judge=_shape(judge) if judge else None,
            judge_lengths=Lengths.recorded([config.reward_model.judge.max_response_length]) if judge else None,
            reference=has_reference(config),
            critic=_shape(Path(config.critic.model or model)) if has_critic(config) else None,
            compute_bytes=2 if config.dtype == "bfloat16" else 4,
            old_log_probs=config.algorithm.old_log_probs == "trainer",
        )
        is_time_shared = strategy_traits(config.placement.strategy).is_time_shared
        self._strategy: Strategy = "split" if judge and not is_time_shared else "colocated"
        self._num_policy = len(config.rollout.urls) or max(1, config.rollout.num_processes)
        self._num_judge = max(1, config.sizes.judges) if judge else 0
        num_engines = max(self._num_policy, self._num_judge) if is_time_shared else self._num_policy + self._num_judge
        num_devices = max(num_engines, config.trainer.num_processes)
        cluster = Cluster(num_devices=num_devices, device=_device(config.device), devices_per_node=num_devices)
        self._num_devices = num_devices
        costs = plan(cluster, self._job, most_num_seqs=config.rollout.max_num_seqs).costs
        # Ranks may be fewer than engines.
        share = num_devices / config.trainer.num_processes
        training = replace(
            costs.training,
            per_token_s=costs.training.per_token_s * share,
            per_pair_s=costs.training.per_pair_s * share,
        )
        self._costs = replace(costs, training=training)

    def stepped(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Observe a step; return its predicted seconds, and their error as a share of the measured ones."""
        if not metrics.get("sampling/groups") or "response_length/mean" not in metrics:
            return {}
        predicted = self._predicted(metrics)
        predicted_s = measured_s = 0.0
        for stage, name in _MEASURED.items():
            law_s, took_s = getattr(predicted, f"{stage}_s"), metrics.get(name, 0.0)
            if law_s > 0 and took_s > 0:
                predicted_s += law_s * self._correction.factor(stage)
                measured_s += took_s
                self._correction.observe(stage, predicted_s=law_s, measured_s=took_s)
        state = json.dumps({"correction": self._correction.state()})
        write_atomically(self._path, lambda partial: partial.write_text(state))
        return {"forecast/stages_s": predicted_s, "forecast/error": predicted_s / measured_s - 1} if measured_s else {}

    def _predicted(self, metrics: Mapping[str, float]) -> StepTime:
        """Predict a step with these lengths, by the laws alone."""
        job = replace(
            self._job,
            prompt_lengths=Lengths.recorded([max(1.0, metrics["prompt_length/mean"])]),
            response_lengths=_lengths(
                metrics["response_length/mean"],
                metrics["response_length/max"],
                count=metrics["sampling/groups"] * self._config.rollout.n,
            ),
            train_batch_size=round(metrics["sampling/groups"]),
            acceptance=min(1.0, max(metrics["sampling/acceptance"], 1e-3)),
        )
        return predict_step(
            self._costs,
            job,
            strategy=self._strategy,
            num_devices=self._num_devices,
            policy_devices=self._num_policy,
            reward_devices=self._num_judge,
        )


def _shape(model: Path) -> ModelShape:
    return ModelShape.from_config(json.loads((model / "config.json").read_text()))


def _device(name: str) -> Device:
    if not name.startswith("cuda"):
        return _CORE
    import torch

    return replace(Device.matching(torch.cuda.get_device_name()), memory_bytes=1e12)


def _lengths(mean: float, longest: float, *, count: float) -> Lengths:
    """Return log-normal lengths of this mean; the longest of `count` of them is about `longest`."""
    mean, longest = max(1.0, mean), max(1.0, longest)
    deviations = NormalDist().inv_cdf(1 - 1 / (count + 1)) if count > 1 else 0.0
    # ln(longest / mean) = sigma * deviations - sigma^2 / 2
    sigma = deviations - math.sqrt(max(0.0, deviations**2 - 2 * math.log(max(1.0, longest / mean))))
    return Lengths.log_normal(median=min(mean * math.exp(-(sigma**2) / 2), longest), sigma=sigma, longest=longest)
