"""The reasons for a plan: the costs of other choices, and changes with which a job would fit."""

from collections.abc import Iterable
from dataclasses import replace
from math import inf

import numpy as np

from gcore_placement.planning.candidates import Candidate, Candidates
from gcore_placement.planning.engine_options import EngineOptions
from gcore_placement.planning.layouts import TrainingLayout
from gcore_placement.planning.plan import Alternative
from gcore_placement.strategies import PLANNED, Strategy, strategy_traits
from gcore_placement.workload.job import Job

_MOST_LAYOUTS = 4
"""Training layouts to name among those that fit, and among those that do not."""
_MOST_DOUBLINGS = 6
"""Doublings of the devices, or halvings of the responses, to try in search of a job that fits."""


def alternatives(known: Candidates, chosen: Candidate) -> tuple[Alternative, ...]:
    """Return the alternatives with one choice changed and the others free, on as many devices."""
    size = chosen.num_devices
    same_strategy = list(known.of(size, chosen.strategy))
    found = [*_strategies(known, chosen)]
    found += _engines(
        "policy engine", known.policy, chosen.policy.tp, ((c.policy.tp, c) for c in same_strategy), known, chosen
    )
    if known.judge is not None and chosen.judge is not None:
        by_tp = ((c.judge.tp, c) for c in same_strategy if c.judge is not None)
        found += _engines("judge's engine", known.judge, chosen.judge.tp, by_tp, known, chosen)
    return (*found, *_training(known, chosen), *_state(same_strategy, chosen))


def why_nothing_fits(known: Candidates, strategy: Strategy | None) -> str:
    """Describe what is too large on all devices, and changes with which the job would fit."""
    cluster, job, usable = known.cluster, known.job, known.usable_bytes
    lines: list[str] = []
    size, options = next((size, options) for size in cluster.sizes() if len((options := known.training(size)).layouts))
    smallest = int(options.total_bytes.argmin())
    if options.total_bytes[smallest] > usable:
        parts = sorted(((float(v[smallest]), k) for k, v in options.memory.items()), reverse=True)[:3]
        most = ", ".join(f"{name} {_gb(size)}" for size, name in parts)
        lines.append(
            f"training needs at least {_gb(options.total_bytes[smallest])} on each device ({most}; "
            f"{options.layouts[smallest]})"
        )
    for name, engines in (("policy", known.policy), ("judge", known.judge)):
        if engines is not None:
            needs, tp = min((engines.least_bytes(tp), tp) for tp in engines.sizes(size))
            if needs > usable:
                lines.append(f"an engine of the {name} needs {_gb(needs)} on each device even at TP {tp}")
    if not lines:
        lines.append(
            f"roles do not fit on the same devices, nor states into {_gb(cluster.host_memory_bytes)} of the host"
        )
    fits = _what_would_fit(known, job, strategy)
    return (
        f"nothing fits on {cluster.num_devices} x {cluster.device.name}, of whose {_gb(cluster.device.memory_bytes)} "
        f"{_gb(usable)} are usable: {'; '.join(lines)}. Would fit: {fits or 'nothing that was tried'}"
    )


def _what_would_fit(known: Candidates, job: Job, strategy: Strategy | None) -> str:
    found: list[str] = []
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        cluster = replace(known.cluster, num_devices=known.cluster.num_devices * 2**doublings)
        if _fits(known.but(cluster=cluster), strategy):
            found.append(f"{cluster.num_devices} devices")
            break
    for halvings in range(1, _MOST_DOUBLINGS + 1):
        longest = job.response_lengths.longest / 2**halvings
        shorter = replace(job, response_lengths=job.response_lengths.cut(longest))
        if _fits(known.but(job=shorter), strategy):
            found.append(f"responses of at most {int(longest)} tokens")
            break
    return ", or ".join(found)


def _fits(known: Candidates, strategy: Strategy | None) -> bool:
    return any(True for size in known.cluster.sizes() for _ in known.of(size, strategy))


def _strategies(known: Candidates, chosen: Candidate) -> Iterable[Alternative]:
    for strategy in PLANNED:
        if strategy == chosen.strategy:
            continue
        if known.job.judge is None:
            yield Alternative(choice="strategy", option=strategy, reason="there is no judge to share the devices with")
            continue
        best = min((c.step_s for c in known.of(chosen.num_devices, strategy)), default=inf)
        traits = strategy_traits(strategy)
        is_fixed = not traits.is_time_shared and not traits.follows_load
        stays = "; its partition stays where it is as lengths drift" if is_fixed else ""
        reason = f"{_compared(best, chosen.step_s)}{stays}" if best < inf else "does not fit"
        yield Alternative(choice="strategy", option=strategy, reason=reason)


def _engines(
    choice: str,
    engines: EngineOptions,
    chosen_tp: int,
    by_tp: Iterable[tuple[int, Candidate]],
    known: Candidates,
    chosen: Candidate,
) -> Iterable[Alternative]:
    best: dict[int, float] = {}
    for tp, candidate in by_tp:
        best[tp] = min(candidate.step_s, best.get(tp, inf))
    for tp in engines.sizes(chosen.num_devices):
        if tp == chosen_tp:
            continue
        needs = engines.least_bytes(tp)
        if tp in best:
            reason = _compared(best[tp], chosen.step_s)
        elif needs > known.usable_bytes:
            reason = f"does not fit: {_gb(needs)} of {_gb(known.usable_bytes)}"
        else:
            reason = "does not fit next to the other roles"
        yield Alternative(choice=choice, option=f"TP {tp}", reason=reason)


def _training(known: Candidates, chosen: Candidate) -> Iterable[Alternative]:
    """Yield other sizes and backends, each with its best micro-batches and recomputation; and no recomputation."""
    options = known.training(chosen.num_devices)
    layouts = options.layouts
    own = layouts[chosen.training.layout]
    seconds = options.seconds + (options.moving_s if chosen.training.offload else 0.0)
    order = np.argsort(layouts.tp * layouts.pp * layouts.cp, kind="stable").tolist()
    by_sizes: dict[str, list[int]] = {}
    for index in order:
        by_sizes.setdefault(_sizes(layouts[index]), []).append(index)

    def reason(indices: list[int]) -> tuple[float, str]:
        """Return the least seconds of those that fit, and the reason as text."""
        least_s = min((float(seconds[i]) for i in indices if options.total_bytes[i] <= known.usable_bytes), default=inf)
        if least_s < inf:
            return least_s, _compared(least_s, chosen.training.seconds, "to train")
        needs = min(float(options.total_bytes[i]) for i in indices)
        return inf, f"does not fit: {_gb(needs)} of {_gb(known.usable_bytes)}"

    others = {sizes: reason(indices) for sizes, indices in by_sizes.items() if sizes != _sizes(own)}
    fit = sorted((found, sizes) for sizes, found in others.items() if found[0] < inf)[:_MOST_LAYOUTS]
    # Among those that do not fit, the simplest are the ones that a user would ask about.
    unfit = [(found, sizes) for sizes, found in others.items() if found[0] == inf][:_MOST_LAYOUTS]
    for (_, why), sizes in [*fit, *unfit]:
        yield Alternative(choice="training", option=sizes, reason=why)
    if own.gradient_checkpointing:
        without = [i for i in by_sizes[_sizes(own)] if not layouts.recompute[i]]
        yield Alternative(choice="training", option="no recomputation", reason=reason(without)[1])


def _state(same_strategy: list[Candidate], chosen: Candidate) -> Iterable[Alternative]:
    offload = not chosen.training.offload
    best = min((c.step_s for c in same_strategy if c.training.offload == offload), default=inf)
    reason = _compared(best, chosen.step_s) if best < inf else "does not fit next to the engines"
    where = "moves to the host for sampling" if offload else "stays on the devices"
    yield Alternative(choice="training state", option=where, reason=reason)


def _sizes(layout: TrainingLayout) -> str:
    return (
        f"{layout.backend} TP {layout.tensor_model_parallel_size} PP {layout.pipeline_model_parallel_size} "
        f"CP {layout.context_parallel_size} DP {layout.data_parallel_size}"
    )


def _compared(seconds: float, chosen_s: float, what: str = "a step") -> str:
    return f"{seconds:.1f} s {what}, {seconds - chosen_s:+.1f} s"


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
