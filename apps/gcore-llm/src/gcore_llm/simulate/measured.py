"""The measured steps of a finished run of `gcore-llm train`, and a simulation of the same sizes."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from gcore_llm.config import TrainConfig
from gcore_llm.simulate.run import coarse_workload, simulate
from gcore_placement import SampledLengths, fit_lengths
from gcore_runs.errors import UserError
from gcore_runs.run_folder import RunFolder, read_jsonl
from gcore_runs.simulation.config import EngineModel, LearnerModel, LengthConfig, RewardModel, SimulateConfig
from gcore_runs.simulation.fit import MeasuredRun


def read_run(path: str, max_steps: int) -> MeasuredRun:
    """Read the last ``max_steps`` steps of a run.

    Raises:
        UserError: the folder holds no such run, or a run that the simulation does not describe.
    """
    folder = RunFolder.existing(path)
    config = folder.load_config(TrainConfig)
    _check_simulated(path, config)
    rows = [row for row in read_jsonl(folder.metrics) if "timing_s/step" in row][-max_steps:]
    limit = config.data.max_response_length
    lengths = [SampledLengths.of_metrics(row, n=config.rollout.n, limit=limit) for row in rows]
    if not any(own.number for own in lengths):
        raise UserError(f"{path}/metrics.jsonl has no steps with responses; expected a run of gcore-llm train")
    model = next((f for f in (folder.export, folder.model, Path(config.model)) if (f / "config.json").is_file()), None)
    if model is None:
        raise UserError(f"{path}: model is {config.model!r}; expected a folder with config.json, or export/ in the run")
    sizes = _sizes(config, model.resolve(), rows, lengths)
    return MeasuredRun(
        name=path,
        config=sizes,
        workload=coarse_workload(sizes),
        rows=rows,
        lengths=lengths,
        simulate=lambda replayed, replay: simulate(replayed, replay=replay),
    )


def _check_simulated(path: str, config: TrainConfig) -> None:
    estimator, turns, epochs = config.algorithm.adv_estimator, config.rollout.multi_turn, config.actor.ppo_epochs
    unfit = {
        f"algorithm.adv_estimator is {estimator!r}": estimator in ("gae", "remax"),
        "rollout.partial_rollout is true": config.rollout.partial_rollout,
        "rollout.multi_turn makes several turns": bool(turns.environment or turns.max_revisions),
        f"actor.ppo_epochs is {epochs}": epochs > 1,
    }
    for name, is_unfit in unfit.items():
        if is_unfit:
            raise UserError(
                f"{path}: {name}; expected a run without a critic and greedy responses, of single turns that end in "
                "the step that started them, and with one epoch"
            )


def _prompt_length(rows: list[dict[str, Any]], lengths: list[SampledLengths], n: int) -> LengthConfig:
    """Return log-normal lengths with the mean of all prompts, and a variance from that of the steps' means."""
    own = [(row["prompt_length/mean"], s.number / n) for row, s in zip(rows, lengths, strict=True) if s.number]
    means, groups = np.array(own).T
    mean = float(np.average(means, weights=groups))
    variance = float(np.mean(groups * (means - mean) ** 2))
    sigma = math.sqrt(math.log1p(variance / mean**2))
    return LengthConfig(median=mean * math.exp(-(sigma**2) / 2), sigma=sigma)


def _sizes(
    config: TrainConfig, model: Path, rows: list[dict[str, Any]], lengths: list[SampledLengths]
) -> SimulateConfig:
    num_ranks = config.trainer.num_processes
    num_engines = len(config.rollout.urls) or max(1, config.rollout.num_processes)
    num_learners = config.trainer.parallel.data_parallel_size(num_ranks)
    devices = math.lcm(num_ranks, num_engines)
    numbers = [own.number for own in lengths]
    median, sigma = fit_lengths(lengths)
    acceptance = float(np.average([row["sampling/acceptance"] for row in rows], weights=numbers))
    return SimulateConfig(
        devices=devices,
        controllers=config.controllers,
        model=str(model),
        seed=config.seed,
        token_unit=1,
        train_batch_size=config.data.train_batch_size,
        n=config.rollout.n,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        prompt_length=_prompt_length(rows, lengths, config.rollout.n),
        response_length=LengthConfig(median=median, sigma=sigma),
        filter_groups=config.algorithm.filter_groups,
        max_num_gen_batches=config.algorithm.max_num_gen_batches,
        old_log_probs=config.algorithm.old_log_probs,
        kl_loss_coef=config.actor.loss.kl_loss_coef or config.algorithm.kl_ctrl.kl_coef,
        ppo_mini_batch_size=config.actor.ppo_mini_batch_size,
        ppo_max_token_len=config.actor.ppo_max_token_len,
        engine=EngineModel(
            devices_per_replica=devices // num_engines,
            max_num_seqs=config.rollout.max_num_seqs,
            prompts="stealing" if config.runtime == "ray" else "shared",
        ),
        reward=RewardModel(
            # With an acceptance of 0 a simulation would have nothing to train on.
            acceptance=max(acceptance, 1e-3),
            latency_sigma=0.0,
            max_concurrency=config.reward_calls.max_concurrency,
        ),
        learner=LearnerModel(devices_per_replica=devices // num_learners),
    )
