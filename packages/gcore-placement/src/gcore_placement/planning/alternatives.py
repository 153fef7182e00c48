"""The choices that a plan does not make: their predicted seconds, and why each was not chosen."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from gcore_placement.planning.candidates import Candidate, Candidates
from gcore_placement.planning.layouts import TrainingState, divides_heads, powers
from gcore_placement.planning.options import EngineOptions, TrainingOptions
from gcore_placement.planning.unfit import LORA_RANK
from gcore_placement.quantities import gigabytes
from gcore_placement.strategies import PLANNED, STRATEGIES

PREDICTION_ERROR = 0.05
"""Share of a step by which two predictions must differ to count as different. An assumption: laws err alike on both."""
_MOST_LAYOUTS = 4
"""Training layouts to name among those that fit, and among those that do not."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A choice that the plan does not make."""

    choice: str
    """The kind of choice: strategy, policy engine, judge's engine, training, training state, trained parameters."""
    option: str
    reason: str
    """The seconds of the option, and why it was not chosen."""
    seconds: float | None = None
    """Predicted seconds of a step; for training, of preparation and training. None: not predicted."""
    difference_s: float | None = None
    """Seconds more than the plan's; below 0 it is faster and has something else against it."""


def alternatives(known: Candidates, chosen: Candidate) -> Iterator[Alternative]:
    """Yield the alternatives with one choice changed and the others free, on as many devices."""
    same_strategy = list(known.of(chosen.num_devices, chosen.strategy))
    yield from _strategies(known, chosen)
    yield from _engines(known, same_strategy, chosen)
    yield from _training(known, chosen)
    if known.setting.runnable:
        yield from _not_written(known, chosen)
        yield from _adapters(known, chosen)

    offload = not chosen.training.offload
    best = min((c.step_s for c in same_strategy if c.training.offload == offload), default=inf)
    where = "moves to the host for sampling" if offload else "stays on the devices"
    why = "does not fit next to the engines"
    if not offload and known.setting.runnable:
        why = "runs of gcore-llm take turns on the devices"
    yield _compared("training state", where, best, chosen, against="" if best < inf else why)


def _strategies(known: Candidates, chosen: Candidate) -> Iterator[Alternative]:
    for strategy in PLANNED:
        if strategy == chosen.strategy:
            continue
        best = inf
        against = "there is no judge to share the devices with"
        if known.judge is not None:
            best = min((c.step_s for c in known.of(chosen.num_devices, strategy)), default=inf)
            against = "does not fit" if best == inf else ""
            if best < inf and not STRATEGIES[strategy].is_time_shared and not STRATEGIES[strategy].follows_load:
                against = "its partition stays where it is as lengths drift"
        yield _compared("strategy", strategy, best, chosen, against=against)


def _engines(known: Candidates, same_strategy: list[Candidate], chosen: Candidate) -> Iterator[Alternative]:
    node = known.setting.cluster.devices_per_node
    roles = {"policy": ("policy engine", known.policy), "judge": ("judge's engine", known.judge)}
    for role, (choice, options) in roles.items():
        if options is None:
            continue
        best: dict[int, float] = {}
        for candidate in same_strategy:
            tp = getattr(candidate, role).tp
            best[tp] = min(candidate.step_s, best.get(tp, inf))
        for tp in sorted({*powers(node), *options.sizes(chosen.num_devices)}):
            if tp != getattr(chosen, role).tp:
                seconds = best.get(tp, inf)
                against = "" if seconds < inf else _unfit_engine(known, options, role, tp, chosen)
                yield _compared(choice, f"TP {tp}", seconds, chosen, against=against)


def _unfit_engine(known: Candidates, options: EngineOptions, role: str, tp: int, chosen: Candidate) -> str:
    """Return why there are no engines over so many devices."""
    job = known.setting.job
    usable = known.setting.usable_bytes
    model = job.policy if role == "policy" or job.judge is None else job.judge
    if tp > chosen.num_devices:
        return f"needs {tp} devices, of {chosen.num_devices}"
    if not divides_heads(model, tp):
        w = model.workload
        return f"{w.num_attention_heads} heads and {w.num_key_value_heads} of keys are not evenly divided by {tp}"
    if (needs := options.least_bytes(tp)) > usable:
        return _over(needs, usable, "of an engine")
    of_policy = [each for each in known.policy.of(chosen.num_devices, usable) if each.tp == tp]
    synced = [known.sync_bytes(each, chosen.training, chosen.num_devices) for each in of_policy]
    if role == "policy" and synced and synced[0] > usable:
        return _over(synced[0], usable, "while weights pass to the engine")
    if known.setting.runnable and known.judge is not None:
        other, others = ("judge", known.judge) if role == "policy" else ("policy", known.policy)
        if tp not in others.sizes(chosen.num_devices):
            return f"policy and judge have engines of as many devices, and the {other}'s heads are not divided by {tp}"
        if (needs := others.least_bytes(tp)) > usable:
            return f"policy and judge have engines of as many devices: {_over(needs, usable, f'of the {other}')}"
        if chosen.num_devices < 2 * tp and not STRATEGIES[chosen.strategy].is_time_shared:
            return f"two engines need {2 * tp} devices, of {chosen.num_devices}"
    return "does not fit next to the other roles"


def _training(known: Candidates, chosen: Candidate) -> Iterator[Alternative]:
    """Yield other sizes and backends, each with its best micro-batches and recomputation; and no recomputation."""
    options = known.training(chosen.num_devices)
    usable = known.setting.usable_bytes
    layouts = options.layouts
    own = layouts[chosen.training.layout]
    seconds = options.seconds + (options.moving_s if chosen.training.offload else 0.0)
    by_sizes: dict[str, list[int]] = {}
    for index in np.argsort(layouts.tp * layouts.pp * layouts.cp, kind="stable").tolist():
        by_sizes.setdefault(layouts[index].sizes, []).append(index)

    def fitting(indices: list[int]) -> list[int]:
        return [i for i in indices if options.total_bytes[i] <= usable]

    def compared(option: str, indices: list[int]) -> Alternative:
        fit = fitting(indices)
        least = min(fit or indices, key=lambda i: float(seconds[i]))
        against = ""
        if not fit:
            # The one that is closest to the memory that there is.
            least = min(indices, key=lambda i: float(options.total_bytes[i]))
            parts = {name: float(sizes[least]) for name, sizes in options.memory.items()}
            largest = max(parts, key=lambda name: parts[name])
            against = _over(float(options.total_bytes[least]), usable, f"{largest} {gigabytes(parts[largest])}")
        elif options.state_bytes[least] > chosen.training.state_bytes and not chosen.training.offload:
            more = gigabytes(float(options.state_bytes[least]) - chosen.training.state_bytes)
            against = f"its state leaves {more} less to the engines"
        return _compared("training", option, float(seconds[least]), chosen, against=against, is_unfit=not fit)

    others = {sizes: indices for sizes, indices in by_sizes.items() if sizes != own.sizes}
    fit = sorted((compared(*other) for other in others.items() if fitting(other[1])), key=_seconds)
    unfit = [compared(*other) for other in others.items() if not fitting(other[1])]
    # Among those that do not fit, the simplest are the ones that a user would ask about, and the fastest.
    fastest = sorted((each for each in unfit[_MOST_LAYOUTS:] if _seconds(each) < chosen.training.seconds), key=_seconds)
    yield from [*fit[:_MOST_LAYOUTS], *unfit[:_MOST_LAYOUTS], *fastest[:_MOST_LAYOUTS]]
    if own.gradient_checkpointing:
        yield compared("no recomputation", [i for i in by_sizes[own.sizes] if not layouts.recompute[i]])


def _not_written(known: Candidates, chosen: Candidate) -> Iterator[Alternative]:
    """Yield the fastest layout that fits and is not considered, as no settings are written for it."""
    every = TrainingOptions(replace(known.setting, runnable=False), chosen.num_devices)
    is_other = ~every.layouts.sharded & (every.total_bytes <= known.setting.usable_bytes)
    if known.setting.state.offload != "none" or not is_other.any():
        return
    seconds = np.where(is_other, every.seconds + every.moving_s, inf)
    fastest = int(seconds.argmin())
    against = "no settings are written for it (--all-layouts)"
    yield _compared("training", every.layouts[fastest].sizes, float(seconds[fastest]), chosen, against=against)


def _adapters(known: Candidates, chosen: Candidate) -> Iterator[Alternative]:
    """Yield adapters in the place of all parameters, or all parameters in the place of adapters."""
    policy = known.setting.job.policy
    usable = known.setting.usable_bytes
    has_adapters = bool(known.setting.state.adapter_parameters)
    adapters = policy.adapter_parameters(LORA_RANK)
    state = TrainingState() if has_adapters else TrainingState(adapter_parameters=adapters)
    options = TrainingOptions(replace(known.setting, state=state), chosen.num_devices)
    fits = options.total_bytes <= usable
    seconds = np.where(fits, options.seconds + options.moving_s, inf)
    least = float(seconds.min())
    against = ""
    if not fits.any():
        against = _over(float(options.total_bytes.min()), usable)
    elif not has_adapters:
        against = f"trains {adapters / 1e6:,.1f} million of {policy.num_parameters / 1e9:.2f} billion parameters"
    option = "all" if has_adapters else f"LoRA of rank {LORA_RANK}"
    yield _compared("trained parameters", option, least, chosen, against=against, what="to train")


def _over(needs: float, usable: float, of: str = "") -> str:
    """Return by how much a device's memory is exceeded."""
    largest = f"; {of}" if of else ""
    return f"does not fit: {gigabytes(needs - usable)} over the {gigabytes(usable)} of each device{largest}"


def _seconds(alternative: Alternative) -> float:
    return inf if alternative.seconds is None else alternative.seconds


def _compared(
    choice: str,
    option: str,
    seconds: float,
    chosen: Candidate,
    *,
    against: str = "",
    what: str = "",
    is_unfit: bool = False,
) -> Alternative:
    """Return an alternative with its seconds against the plan's, and what else is against it, first if it is unfit."""
    is_training = choice == "training" or what == "to train"
    own_s, what = (chosen.training.seconds, "to train") if is_training else (chosen.step_s, "a step")
    if seconds == inf:
        return Alternative(choice=choice, option=option, reason=against or "does not fit")
    difference_s = seconds - own_s
    timed = f"{seconds:.1f} s {what}, {difference_s:+.1f} s"
    if not against and abs(difference_s) < PREDICTION_ERROR * chosen.step_s:
        against = "within the prediction's error"
    reason = f"{against}; {timed}" if is_unfit else f"{timed}; {against}" if against else timed
    return Alternative(choice=choice, option=option, reason=reason, seconds=seconds, difference_s=difference_s)
