"""Predictions of published steps by gcore-placement's laws, and the constants that are fitted to a few of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from gcore_bench.placement.fitting import Constants, fit_constants
from gcore_bench.placement.oracles.steps import PublishedStep, Stage
from gcore_placement import (
    Cluster,
    Efficiency,
    EngineLayout,
    Job,
    Lengths,
    ModelShape,
    StepTime,
    predict_layout,
)

_STREAM_PARTS = 4
"""Parts of a stream's step."""
_UPPER_BOUNDS = {
    "training": 1.0,
    "experts": 1.0,
    "sigma": 1.5,
}
"""Largest fitted values; the others have no limit."""


@dataclass(frozen=True, kw_only=True)
class Fit(Efficiency):
    """The constants of a study."""

    response_tokens: float = 1500.0
    """Mean tokens of a response, if the report has none."""
    sigma: float = 0.7
    """Standard deviation of the logarithms of response lengths, before they are cut at the longest."""


@cache
def find_lengths(mean: float, sigma: float, longest: float) -> Lengths:
    """Return log-normal lengths, cut at the longest, that have this mean after the cut."""
    low = 1.0
    high = longest
    for _ in range(40):
        median = (low * high) ** 0.5
        if Lengths.log_normal(median=median, sigma=sigma, longest=longest).mean < mean:
            low = median
        else:
            high = median
    return Lengths.log_normal(median=low, sigma=sigma, longest=longest)


def predict_sync_s(
    model: ModelShape, cluster: Cluster, num_devices: int, efficiency: Efficiency
) -> float:
    """Predict the seconds in which each of so many devices receives a whole model in bfloat16."""
    bytes_per_s = cluster.link_bytes_per_s(num_devices) * efficiency.links
    return 2 * model.num_parameters / bytes_per_s


def predict_imbalance(lengths: Lengths, *, ranks: int, samples: int) -> float:
    """Return the expected tokens of the busiest rank over the mean, if each rank gets so many samples at random."""
    num_draws = 64
    quantiles = np.random.default_rng(0).random((num_draws, ranks, samples))
    positions = np.searchsorted(lengths.edges, quantiles, side="right") - 1
    tokens = lengths.values[positions].sum(axis=2)
    return float(tokens.max(axis=1).mean() / tokens.mean())


def predict_stages(step: PublishedStep, fit: Fit) -> dict[Stage, float]:
    """Predict the seconds of the stages and of the whole step, whose schedule overlaps some of them.

    In both systems every rank gathers each tensor of new weights whole, before engines take their shards.
    """
    longest = float(step.max_response_tokens)
    mean = step.response_tokens or fit.response_tokens
    responses = find_lengths(min(mean, 0.95 * longest), fit.sigma, longest)

    trained = _predict_layout(step, fit, responses, step.ranks)
    preparation_s = trained.preparation_s
    training_s = trained.training_s
    if not step.is_even:
        replicas = step.layout.data_parallel_size
        samples = step.ppo_mini_batch_size * step.n // replicas
        training_s *= predict_imbalance(responses, ranks=replicas, samples=samples)
    cluster = _build_cluster(step)
    after_s = predict_sync_s(step.shape, cluster, cluster.num_devices, fit) + trained.swap_s

    sampled = responses
    if step.schedule == "stale stream":
        # Sampling never waits for the last response of a step, so an engine's slots are always taken.
        sampled = Lengths.recorded([responses.mean])
    generation_s = _predict_layout(step, fit, sampled, step.engine_devices).generation_s

    if step.schedule == "turns":
        total_s = generation_s + preparation_s + training_s + after_s
    elif step.schedule == "stream":
        part_s = (preparation_s + training_s) / _STREAM_PARTS
        total_s = max(generation_s, (_STREAM_PARTS - 1) * part_s) + part_s + after_s
    else:
        total_s = max(generation_s, preparation_s + training_s) + after_s
    return {
        "generation": generation_s,
        "preparation": preparation_s,
        "training": training_s,
        "step": total_s,
    }


def _build_cluster(step: PublishedStep) -> Cluster:
    num_devices = step.ranks
    if step.schedule != "turns":
        num_devices += step.engine_devices
    return Cluster(
        num_devices=num_devices, device=step.hardware, devices_per_node=step.devices_per_node
    )


def _predict_layout(
    step: PublishedStep, fit: Fit, responses: Lengths, num_devices: int
) -> StepTime:
    """Predict the step with engines on so many devices."""
    job = Job(
        policy=step.shape,
        prompt_lengths=Lengths.recorded([step.prompt_tokens]),
        response_lengths=responses,
        train_batch_size=step.prompts,
        n=step.n,
        reference=step.reference,
        old_log_probs=step.old_log_probs,
        ppo_mini_batch_size=step.ppo_mini_batch_size,
    )
    engines = EngineLayout(
        num_engines=max(1, num_devices // step.devices_per_engine),
        devices_per_engine=step.devices_per_engine,
        max_num_seqs=1024,
    )
    return predict_layout(
        _build_cluster(step),
        job,
        step.layout,
        engines,
        efficiency=fit,
        takes_turns=step.schedule == "turns",
        host_moves=step.host_moves,
    )


def fit_study(steps: Sequence[PublishedStep], start: Fit) -> Fit:
    """Fit the constants of a study to the rows that name them, by least squares of log(predicted / measured).

    If a row has its stages, they are fitted and the whole step is not: it contains time that belongs to no stage.
    """
    fitted_steps = [step for step in steps if step.fits]
    if not fitted_steps:
        return start

    def compute_residuals(constants: Constants) -> NDArray[np.float64]:
        fit = replace(start, **constants)
        ratios: list[float] = []
        for step in fitted_steps:
            predicted_s = predict_stages(step, fit)
            measured_s = step.measured_s
            if len(measured_s) > 1:
                del measured_s["step"]
            ratios += [predicted_s[stage] / seconds for stage, seconds in measured_s.items()]
        return np.log(ratios)

    first = {name: getattr(start, name) for name in list_constants(steps)}
    return replace(start, **fit_constants(first, compute_residuals, _UPPER_BOUNDS))


def list_constants(steps: Sequence[PublishedStep]) -> list[str]:
    """Return the names of the constants that are fitted to any of the steps."""
    names = " ".join(map(attrgetter("fits"), steps))
    return list(dict.fromkeys(names.split()))
