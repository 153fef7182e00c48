"""Fit the costs of simulated services to the seconds of measured steps, by least squares on the simulation's own times.

Simulated times are linear in the parameters, or piecewise linear where replicas wait for each other, so a few rounds of
Gauss-Newton are enough. Derivatives are differences of whole simulations.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gcore_placement import SampledLengths
from gcore_runs.errors import UserError
from gcore_runs.loop.recorder import frozen_objects
from gcore_runs.run_folder import read_jsonl
from gcore_runs.simulation.cluster import Simulation
from gcore_runs.simulation.config import (
    EngineModel,
    LearnerModel,
    LengthModel,
    RewardModel,
    SimulateConfig,
)
from gcore_runs.simulation.tokens import CoarseWorkload, Replay

STAGES = ("gen", "reward", "prepare", "train", "sync", "rest")
"""The stages of a step; rest is the time outside all others."""

_ROUNDS = 3
_LEAST = 1e-15
"""Least seconds of a parameter that must be above 0 in the settings."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """The steps of a finished run, in order, and a simulation of the same sizes."""

    name: str
    """Folder of the run."""
    config: SimulateConfig
    """The sizes and lengths of the run, without the time that its services take."""
    workload: CoarseWorkload
    rows: list[dict[str, Any]]
    """Metrics of each step."""
    sampled: list[SampledLengths]
    """Response lengths of each step."""
    simulate: Callable[..., Simulation]
    """Runs the program of a config on modelled services, with the responses of a ``replay``."""

    @property
    def is_scored(self) -> bool:
        """True if models score responses before the update; otherwise preparation counts as part of the rest."""
        config = self.config
        num_updates = -(-config.batch_size // (config.ppo_mini_batch_size or config.batch_size))
        return bool(config.kl_loss_coef) or (config.old_log_probs == "trainer" and num_updates > 1)

    def measured_seconds(self) -> NDArray[np.float64]:
        """Return the measured seconds: [steps, stages]."""
        return self._seconds(self.rows)

    def simulate_seconds(self, parameters: "Parameters") -> NDArray[np.float64]:
        """Simulate the run with its responses, for which all prompts have the mean length: [steps, stages]."""
        n = self.config.n
        num_kept: list[int] = []
        for row, lengths in zip(self.rows, self.sampled, strict=True):
            num_kept.append(round(row["sampling/acceptance"] * lengths.number / n))
        mean = float(
            np.mean([row["prompt_length/mean"] for row in self.rows if "prompt_length/mean" in row])
        )
        replay = None
        if not self.config.sessions.is_used:
            replay = Replay(
                self.sampled,
                num_kept,
                n=n,
                sigma=self.config.response_length.sigma,
                seed=self.config.seed,
            )
        config = replace(
            self.config, prompt_length=LengthModel(median=mean, sigma=0.0), steps=len(self.rows)
        )
        simulation = self.simulate(parameters.apply(config, self.workload), replay=replay)
        seconds = self._seconds(step.metrics for step in simulation.steps)
        # The program meets the overhead where it waits for new weights.
        seconds[:, STAGES.index("sync")] -= parameters.overhead_s
        seconds[:, STAGES.index("rest")] += parameters.overhead_s
        return seconds

    def _seconds(self, rows: Iterable[Mapping[str, float]]) -> NDArray[np.float64]:
        """Return the seconds of each stage in steps with these metrics: [steps, stages]."""
        seconds: list[list[float]] = []
        for metrics in rows:
            by_stage = {stage: metrics.get(f"timing_s/{stage}", 0.0) for stage in STAGES[:-1]}
            if not self.is_scored:
                by_stage["prepare"] = 0.0
            by_stage["rest"] = metrics["timing_s/step"] - sum(by_stage.values())
            seconds.append(list(by_stage.values()))
        return np.array(seconds)


def measured_run(
    name: str,
    metrics: Path,
    settings: Mapping[str, Any],
    *,
    workload: CoarseWorkload,
    simulate: Callable[..., Simulation],
    max_steps: int,
    num_ranks: int,
    num_replicas: int,
    num_engines: int,
    engine: Mapping[str, Any],
    reward: Mapping[str, Any],
    sessions: Mapping[str, Any],
) -> MeasuredRun:
    """Read the last ``max_steps`` steps of a run; `UserError` if they have no responses.

    Args:
        settings: of the program, see `SimulateConfig`.
        num_ranks: training ranks, of ``num_replicas`` data-parallel replicas.
        engine: further settings of the section; ``reward`` is alike.
        sessions: settings of a run with sessions, see `SimConfig`: their turns, and the length of each.
    """
    n = settings["n"]
    limit = settings["max_response_length"]
    rows = [row for row in read_jsonl(metrics) if "timing_s/step" in row][-max_steps:]
    sampled = [SampledLengths.of_metrics(row, n=n, limit=limit) for row in rows]
    numbers = [lengths.number for lengths in sampled]
    if not any(numbers):
        raise UserError(
            f"{name}/{metrics.name} has no steps with responses; expected a run of gcore-llm train"
        )
    acceptance = float(np.average([row["sampling/acceptance"] for row in rows], weights=numbers))
    median, sigma = SampledLengths.fit(sampled)
    devices = math.lcm(num_ranks, num_engines)
    config = SimulateConfig(
        **settings,
        devices=devices,
        token_unit=1,
        prompt_length=_prompt_length(rows, sampled, n),
        response_length=LengthModel(median=median, sigma=sigma),
        engine=EngineModel(devices_per_replica=devices // num_engines, **engine),
        # With an acceptance of 0 a simulation would have nothing to train on.
        reward=RewardModel(acceptance=max(acceptance, 1e-3), latency_sigma=0.0, **reward),
        learner=LearnerModel(devices_per_replica=devices // num_replicas),
    )
    config = replace(config, **sessions)
    return MeasuredRun(
        name=name, config=config, workload=workload, rows=rows, sampled=sampled, simulate=simulate
    )


def _prompt_length(
    rows: list[dict[str, Any]], sampled: list[SampledLengths], n: int
) -> LengthModel:
    """Return log-normal lengths with the mean of all prompts, and a variance from that of the steps' means."""
    pairs: list[tuple[float, float]] = []
    for row, lengths in zip(rows, sampled, strict=True):
        if lengths.number:
            pairs.append((row["prompt_length/mean"], lengths.number / n))
    means, groups = np.array(pairs).T
    mean = float(np.average(means, weights=groups))
    return LengthModel.of_moments(mean, float(np.mean(groups * (means - mean) ** 2)))


class Fitted(NamedTuple):
    """The meaning of a fitted parameter."""

    stage: str
    """The stage whose time it is fitted to."""
    probe: int
    """The simulation that changes it, with others that change no stage that it changes."""
    label: str
    unit: str
    factor: float
    """From seconds to the unit."""


FITTED = {
    "base_s": Fitted("gen", 0, "decoding step", "ms", 1e3),
    "per_sample_s": Fitted("gen", 1, "... and each running response", "us", 1e6),
    "prefill_s": Fitted("gen", 2, "token of a prompt", "us", 1e6),
    "latency_s": Fitted("reward", 0, "reward", "ms", 1e3),
    "flop_s": Fitted("train", 0, "training, 10^9 FLOPs", "ms", 1e12),
    "micro_batch_s": Fitted("train", 1, "... and each micro-batch", "ms", 1e3),
    "forward_share": Fitted("prepare", 2, "pass that scores, share of one that trains", "", 1.0),
    "sync_s": Fitted("sync", 0, "weight sync", "ms", 1e3),
    "overhead_s": Fitted("rest", 0, "rest of a step", "ms", 1e3),
}
"""The parameters by name."""

_NUM_PROBES = 1 + max(fitted.probe for fitted in FITTED.values())


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The fitted parameters, each at least 0, under the names of their settings.

    In the place of settings that are rates there are seconds: of a prompt token, of a FLOP, and of a weight sync.
    """

    base_s: float = 0.01
    per_sample_s: float = 1e-4
    prefill_s: float = 1e-4
    latency_s: float = 0.01
    flop_s: float = 1e-12
    micro_batch_s: float = 0.01
    forward_share: float = 1 / 3
    sync_s: float = 0.01
    overhead_s: float = 0.01

    def apply(self, config: SimulateConfig, workload: CoarseWorkload) -> SimulateConfig:
        """Return the settings of a simulation with these parameters."""
        engine = replace(
            config.engine,
            base_s=max(self.base_s, _LEAST),
            per_sample_s=self.per_sample_s,
            prefill_tokens_per_s=1 / max(self.prefill_s, _LEAST),
        )
        learner = replace(
            config.learner,
            flops_per_s=1 / max(self.flop_s, 1e-30),
            micro_batch_s=self.micro_batch_s,
            forward_share=max(self.forward_share, _LEAST),
            sync_gb_per_s=1 / max(self.sync_s / (workload.weights_bytes / 1e9), _LEAST),
        )
        reward = replace(config.reward, latency_s=self.latency_s)
        return replace(
            config, overhead_s=self.overhead_s, engine=engine, reward=reward, learner=learner
        )

    def move(self, probe: int) -> "Parameters":
        """Return the parameters with those of a probe changed for a derivative."""
        names = [name for name, fitted in FITTED.items() if fitted.probe == probe]
        return replace(self, **{name: getattr(self, name) + self.change(name) for name in names})

    def change(self, name: str) -> float:
        """Return the change of a parameter for a derivative."""
        return 0.1 * (getattr(self, name) or getattr(Parameters(), name))


@frozen_objects()
def fit(
    runs: Sequence[MeasuredRun], used: Sequence[NDArray[np.bool_]], advance: Callable[[], None]
) -> tuple[Parameters, Mapping[str, float]]:
    """Fit all parameters to some steps of one or more runs, and return them with their standard errors.

    A parameter that no step depends on keeps its value, and has no error.

    Each stage is fitted by itself, weighted by the inverse of its simulated time: that is, the variance grows with the
    time, and without priors the simulated times add up to the measured ones (with priors, they are scaled so).

    Costs that steps of similar sizes do not separate are decided by priors, each with a standard deviation as large as
    its mean: a token of a prompt, and one more response in a decoding step, take the FLOPs of a forward pass at the
    rate of training, and a micro-batch three times the time of a decoding step without responses.

    Args:
        used: which steps of each run to fit to, [steps] each.
        advance: called after each of `num_simulations`.
    """

    def seconds(parameters: Parameters) -> NDArray[np.float64]:
        parts: list[NDArray[np.float64]] = []
        for run, chosen in zip(runs, used, strict=True):
            parts.append(run.simulate_seconds(parameters)[chosen])
            advance()
        return np.concatenate(parts)

    measured = np.concatenate(
        [run.measured_seconds()[chosen] for run, chosen in zip(runs, used, strict=True)]
    )
    parameters = Parameters()
    errors = dict[str, float]()
    for number in range(_ROUNDS):
        now = seconds(parameters)
        moved = [seconds(parameters.move(probe)) for probe in range(_NUM_PROBES)]
        prior = _prior(parameters, runs[0]) if number else {}
        values = asdict(parameters)
        for column, stage in enumerate(STAGES):
            names = [name for name, fitted in FITTED.items() if fitted.stage == stage]
            changes = [
                (moved[FITTED[name].probe] - now)[:, column] / parameters.change(name)
                for name in names
            ]
            slopes = np.stack(changes, axis=1)
            constant = now[:, column] - slopes @ [values[name] for name in names]
            expected = [prior.get(name) for name in names]
            coefficients, deviations = _least_squares(
                slopes, measured[:, column] - constant, expected
            )
            for name, slope, value, error in zip(
                names, slopes.T, coefficients, deviations, strict=True
            ):
                if slope.any():
                    values[name] = float(value)
                    errors[name] = float(error)
        parameters = Parameters(**values)
    return parameters, errors


def num_simulations(runs: Sequence[MeasuredRun]) -> int:
    """Return the number of simulations of a fit."""
    return _ROUNDS * (1 + _NUM_PROBES) * len(runs)


def _prior(parameters: Parameters, run: MeasuredRun) -> dict[str, float]:
    # A token's forward pass at the rate of training, on the devices of an engine replica.
    token_s = (
        run.workload.flops_per_token / 3 * parameters.flop_s / run.config.engine.devices_per_replica
    )
    return {"per_sample_s": token_s, "prefill_s": token_s, "micro_batch_s": 3 * parameters.base_s}


def _least_squares(
    x: NDArray[np.float64], y: NDArray[np.float64], expected: Sequence[float | None]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return [K] coefficients >= 0 of ``x`` [N, K] for ``y`` [N], whose variance grows with it, and their errors.

    ``expected`` is the mean and the standard deviation of each one's prior; None: it has none.
    """
    size = x.shape[1]
    prior = np.diag([1 / e if e else 0.0 for e in expected])
    prior_y = np.array([1.0 if e else 0.0 for e in expected])
    weight = np.ones(len(y))
    noise = 0.0
    coefficients = np.zeros(size)
    errors = np.zeros(size)
    for _ in range(10):
        a = np.concatenate([x * weight[:, None], noise * prior])
        b = np.concatenate([y * weight, noise * prior_y])
        coefficients = _non_negative(a, b)
        fitted = x @ coefficients
        weight = 1 / np.sqrt(np.maximum(fitted, 1e-9 + 1e-3 * fitted.max()))
        noise = float(np.sqrt(np.sum((weight * (y - fitted)) ** 2) / max(1, len(y) - size)))
        scale = np.maximum(np.linalg.norm(a, axis=0), 1e-300)
        errors = noise * np.sqrt(np.diag(np.linalg.pinv((a / scale).T @ (a / scale)))) / scale
    total = float((x @ coefficients).sum())
    if total:
        coefficients = coefficients * (max(float(y.sum()), 0.0) / total)
    return coefficients, errors


def _non_negative(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the [K] least squares solution of |a v - b| over v >= 0, the best over all sets of positive ones."""
    scale = np.linalg.norm(a, axis=0)
    best = np.zeros(a.shape[1])
    least = float(b @ b)
    present = [int(k) for k in np.flatnonzero(scale)]
    subsets = chain.from_iterable(
        combinations(present, size) for size in range(1, len(present) + 1)
    )
    for chosen in map(list, subsets):
        part, _, rank, _ = np.linalg.lstsq(a[:, chosen] / scale[chosen], b)
        loss = float(np.sum((a[:, chosen] @ (part / scale[chosen]) - b) ** 2))
        # Rounding must not prefer more coefficients where fewer do as well.
        if rank == len(chosen) and (part >= 0).all() and loss < least * (1 - 1e-12):
            best = np.zeros(a.shape[1])
            least = loss
            best[chosen] = part / scale[chosen]
    return best
