"""Predictions of published steps by the laws, and the constants that are fitted to some."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from gcore_bench.placement.oracles.models import CONFIGS
from gcore_bench.placement.oracles.published import PublishedStep, Stage
from gcore_placement import (
    Cluster,
    Device,
    Efficiency,
    EngineLayout,
    Job,
    Lengths,
    ModelShape,
    StepTime,
    predict_layout,
)

_MAX_NUM_SEQS = 1024
_STREAM_PARTS = 4
"""Parts of a stream's step."""
_DRAWS = 64
"""Updates that are drawn to find the tokens of the rank that has most."""
_MOST = {"training": 1.0, "experts": 1.0, "sigma": 1.5}
"""Largest values that are fitted; the others have no limit."""
_LENGTHS = ("response_tokens", "sigma")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The laws of a study."""

    efficiency: Efficiency
    response_tokens: float = 1500.0
    """Mean tokens where the report has none."""
    sigma: float = 0.7
    """Standard deviation of the logarithms of responses, before they are cut at the longest."""


@cache
def lengths_of_mean(mean: float, sigma: float, longest: float) -> Lengths:
    """Return log-normal lengths that are cut at the longest, and have this mean after it."""

    def of(median: float) -> Lengths:
        return Lengths.log_normal(median=median, sigma=sigma, longest=longest)

    low, high = 1.0, longest
    for _ in range(40):
        median = (low * high) ** 0.5
        low, high = (median, high) if of(median).mean < mean else (low, median)
    return of(low)


def whole_sync_s(model: ModelShape, cluster: Cluster, num_devices: int, efficiency: Efficiency) -> float:
    """Return the seconds in which each of so many devices gets a whole model in bfloat16."""
    return 2 * model.num_parameters / (cluster.link_bytes_per_s(num_devices) * efficiency.links)


def slowest_rank(lengths: Lengths, *, ranks: int, samples: int) -> float:
    """Return the mean tokens of the rank that has most, over those of all, where each has so many samples at random."""
    drawn = np.random.default_rng(0).random((_DRAWS, ranks, samples))
    tokens = lengths.values[np.searchsorted(lengths.edges, drawn, side="right") - 1].sum(axis=2)
    return float(tokens.max(axis=1).mean() / tokens.mean())


def predicted(step: PublishedStep, fit: Fit) -> dict[Stage, float]:
    """Predict the seconds of the stages and of the whole step, as its schedule overlaps them.

    Both systems make each tensor of new weights whole on every rank before engines take their parts.
    """
    longest = float(step.most_response_tokens)
    mean = step.response_tokens or fit.response_tokens
    responses = lengths_of_mean(min(mean, 0.95 * longest), fit.sigma, longest)

    turns, ranks = step.schedule == "turns", step.training.num_ranks
    model = ModelShape.from_config(CONFIGS[step.model])
    num_devices = ranks if turns else ranks + step.engine[0]
    cluster = Cluster(num_devices=num_devices, device=Device.named(step.device), devices_per_node=step.devices_per_node)

    def times(responses: Lengths, *, engines: bool) -> StepTime:
        devices = step.engine[0] if engines else ranks
        job = Job(
            policy=model,
            prompt_lengths=Lengths.recorded([step.prompt_tokens]),
            response_lengths=responses,
            train_batch_size=step.prompts,
            n=step.n,
            reference=step.reference,
            old_log_probs=step.old_log_probs,
            ppo_mini_batch_size=step.ppo_mini_batch_size,
        )
        engine = EngineLayout(
            num_engines=max(1, devices // step.engine[1]), devices_per_engine=step.engine[1], max_num_seqs=_MAX_NUM_SEQS
        )
        return predict_layout(
            cluster,
            job,
            step.training,
            engine,
            efficiency=fit.efficiency,
            takes_turns=turns,
            host_moves=step.host_moves,
        )

    generating, training = times(responses, engines=True), times(responses, engines=False)
    generation_s, prepared_s, trained_s = generating.generation_s, training.preparation_s, training.training_s
    if not step.is_even:
        replicas = step.training.data_parallel_size
        trained_s *= slowest_rank(responses, ranks=replicas, samples=step.ppo_mini_batch_size * step.n // replicas)
    after_s = whole_sync_s(model, cluster, num_devices, fit.efficiency) + training.swap_s
    if step.schedule == "stale stream":
        # Without an end of the step that is waited for, the mean response takes an engine's place as long as it does.
        generation_s = times(Lengths.recorded([responses.mean]), engines=True).generation_s
    if turns:
        total_s = generation_s + prepared_s + trained_s + after_s
    elif step.schedule == "stream":
        last_s = (prepared_s + trained_s) / _STREAM_PARTS
        total_s = max(generation_s, (_STREAM_PARTS - 1) * last_s) + last_s + after_s
    else:
        total_s = max(generation_s, prepared_s + trained_s) + after_s
    return {"generation": generation_s, "preparation": prepared_s, "training": trained_s, "step": total_s}


def fit_study(steps: Sequence[PublishedStep], start: Fit) -> Fit:
    """Fit a study's constants to its steps that name them: logarithms of laws and measurements differ least.

    Where stages were measured, they are fitted, and not their sum, which holds what no stage does.
    """
    chosen = [step for step in steps if step.fits]
    if not chosen:
        return start
    names = list(dict.fromkeys(name for step in chosen for name in step.fits))
    first = {**asdict(start.efficiency), "response_tokens": start.response_tokens, "sigma": start.sigma}

    def applied(logs: NDArray[np.float64]) -> Fit:
        values = dict(zip(names, np.exp(logs).tolist(), strict=True))
        lengths = {name: values.pop(name) for name in _LENGTHS if name in values}
        return replace(start, efficiency=replace(start.efficiency, **values), **lengths)

    def misses(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        found: list[float] = []
        for step in chosen:
            law = predicted(step, applied(logs))
            stages: list[Stage] = [stage for stage in step.measured if stage != "step"] or ["step"]
            found += [np.log(law[stage] / step.measured[stage]) for stage in stages]
        return np.array(found)

    most = np.log([_MOST.get(name, np.inf) for name in names])
    return applied(least_squares(misses, np.log([first[name] for name in names]), bounds=(-np.inf, most)).x)
