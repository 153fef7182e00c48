"""The alternatives to a plan: their predicted seconds, and the reason against each."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from gcore_placement.planning.candidates import Candidate, Candidates
from gcore_placement.planning.layouts import divides_heads, powers
from gcore_placement.planning.memory import LORA_RANK, TrainingState, parts_at
from gcore_placement.planning.options import EngineOptions, TrainingOptions
from gcore_placement.quantities import gigabytes
from gcore_placement.strategies import PLANNED, STRATEGIES

PREDICTION_ERROR = 0.05
"""Least difference of two predictions that counts, as a share of a step. An assumption: laws err alike on both."""
_MOST_LAYOUTS = 4
"""Most training layouts to show, of those that fit and of those that do not."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A choice that the plan does not make.

    Example:
        >>> policy = ModelShape(qkv_bias=True, workload=TransformerWorkload(
        ...     hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        ...     num_key_value_heads=4, head_dim=128, vocab_size=152064))
        >>> lengths = Lengths.log_normal(median=900, sigma=0.8, longest=4096)
        >>> job = Job(policy=policy, prompt_lengths=lengths, response_lengths=lengths, train_batch_size=64, n=8)
        >>> chosen = plan(Cluster(num_devices=8, device=Device.named("H100")), job)
        >>> for other in chosen.alternatives:
        ...     if other.choice == "policy engine" and other.difference_s is not None:
        ...         print(other.option, f"{other.difference_s:.1f} s")
        TP 1 13.1 s
        TP 2 4.4 s
    """

    choice: str
    """The kind of choice: strategy, policy engine, judge's engine, training, training state, trained parameters."""
    option: str
    reason: str
    """The seconds of the option, and why it was not chosen."""
    seconds: float | None = None
    """Predicted seconds of a step; for training, of preparation and training. None: not predicted."""
    difference_s: float | None = None
    """Seconds more than the plan's; below 0 it is faster and has something else against it."""


def alternatives(candidates: Candidates, chosen: Candidate) -> Iterator[Alternative]:
    """Yield the alternatives with one choice changed and the others free, on as many devices."""
    same_strategy = list(candidates.of(chosen.num_devices, chosen.strategy))
    yield from _strategies(candidates, chosen)
    yield from _engines(candidates, same_strategy, chosen)
    yield from _training(candidates, chosen)
    if candidates.setting.runnable:
        yield from _not_written(candidates, chosen)
        yield from _adapters(candidates, chosen)

    yield _other_state(candidates, same_strategy, chosen)


def _other_state(
    candidates: Candidates, same_strategy: list[Candidate], chosen: Candidate
) -> Alternative:
    """Return the alternative of a state that stays on the devices if the plan's moves, and the reverse."""
    option = "moves to the host for sampling"
    unfit = "does not fit next to the engines"
    if chosen.training.offload:
        option = "stays on the devices"
        if candidates.setting.runnable:
            unfit = "runs of gcore-llm take turns on the devices"
    moved = [c for c in same_strategy if c.training.offload != chosen.training.offload]
    return _compare("training state", option, _least_step_s(moved), chosen, unfit=unfit)


def _strategies(candidates: Candidates, chosen: Candidate) -> Iterator[Alternative]:
    for strategy in PLANNED:
        if strategy == chosen.strategy:
            continue
        best = inf
        unfit = "there is no judge to share the devices with"
        if candidates.judge is not None:
            best = _least_step_s(candidates.of(chosen.num_devices, strategy))
            unfit = "does not fit"
        against = ""
        if not STRATEGIES[strategy].is_time_shared and not STRATEGIES[strategy].follows_load:
            against = "its partition stays where it is as lengths drift"
        yield _compare("strategy", strategy, best, chosen, against=against, unfit=unfit)


def _least_step_s(candidates: Iterable[Candidate]) -> float:
    return min((candidate.step_s for candidate in candidates), default=inf)


def _engines(
    candidates: Candidates, same_strategy: list[Candidate], chosen: Candidate
) -> Iterator[Alternative]:
    node = candidates.setting.cluster.devices_per_node
    roles = {
        "policy": ("policy engine", candidates.policy),
        "judge": ("judge's engine", candidates.judge),
    }
    for role, (choice, options) in roles.items():
        if options is None:
            continue
        best: dict[int, float] = {}
        for candidate in same_strategy:
            tp = getattr(candidate, role).tp
            best[tp] = min(candidate.step_s, best.get(tp, inf))
        for tp in sorted(set(powers(node) + options.sizes(chosen.num_devices))):
            if tp == getattr(chosen, role).tp:
                continue
            unfit = ""
            if tp not in best:
                unfit = _unfit_engine(candidates, options, role, tp, chosen)
            yield _compare(choice, f"TP {tp}", best.get(tp, inf), chosen, unfit=unfit)


def _unfit_engine(
    candidates: Candidates, options: EngineOptions, role: str, tp: int, chosen: Candidate
) -> str:
    """Return the reason against engines over `tp` devices."""
    usable = candidates.setting.usable_bytes
    if tp > chosen.num_devices:
        return f"needs {tp} devices, of {chosen.num_devices}"
    if not divides_heads(options.model, tp):
        w = options.model.workload
        return f"{w.num_attention_heads} heads and {w.num_key_value_heads} of keys are not evenly divided by {tp}"
    needs = options.least_bytes(tp)
    if needs > usable:
        return _over(needs, usable, "of an engine")
    same_tp = [
        engines for engines in candidates.policy.of(chosen.num_devices, usable) if engines.tp == tp
    ]
    if role == "policy" and same_tp:
        sync_bytes = candidates.sync_bytes(same_tp[0], chosen.training, chosen.num_devices)
        if sync_bytes > usable:
            return _over(sync_bytes, usable, "while weights pass to the engine")
    if candidates.setting.runnable and candidates.judge is not None:
        partner = "policy"
        partner_options = candidates.policy
        if role == "policy":
            partner = "judge"
            partner_options = candidates.judge
        if tp not in partner_options.sizes(chosen.num_devices):
            return (
                "policy and judge have engines of as many devices, "
                f"and the {partner}'s heads are not divided by {tp}"
            )
        needs = partner_options.least_bytes(tp)
        if needs > usable:
            return f"policy and judge have engines of as many devices: {_over(needs, usable, f'of the {partner}')}"
        if chosen.num_devices < 2 * tp and not STRATEGIES[chosen.strategy].is_time_shared:
            return f"two engines need {2 * tp} devices, of {chosen.num_devices}"
    return "does not fit next to the other roles"


def _training(candidates: Candidates, chosen: Candidate) -> Iterator[Alternative]:
    """Yield other sizes and backends, each with its best micro-batches and recomputation; and no recomputation."""
    options = candidates.training(chosen.num_devices)
    usable = candidates.setting.usable_bytes
    layouts = options.layouts
    chosen_layout = layouts[chosen.training.layout]
    seconds = options.offloaded_s if chosen.training.offload else options.seconds
    by_sizes: dict[str, list[int]] = {}
    for index in np.argsort(layouts.tp * layouts.pp * layouts.cp, kind="stable").tolist():
        by_sizes.setdefault(layouts[index].sizes, []).append(index)

    def find_fitting(indices: list[int]) -> list[int]:
        return [i for i in indices if options.total_bytes[i] <= usable]

    def describe(option: str, indices: list[int]) -> Alternative:
        fitting = find_fitting(indices)
        against = ""
        least = min(fitting or indices, key=lambda i: float(seconds[i]))
        if not fitting:
            # The layout that needs least memory.
            least = min(indices, key=lambda i: float(options.total_bytes[i]))
            parts = parts_at(options.memory, least)
            largest = max(parts, key=lambda name: parts[name])
            against = _over(
                float(options.total_bytes[least]), usable, f"{largest} {gigabytes(parts[largest])}"
            )
        elif (
            options.state_bytes[least] > chosen.training.state_bytes and not chosen.training.offload
        ):
            more = gigabytes(float(options.state_bytes[least]) - chosen.training.state_bytes)
            against = f"its state leaves {more} less to the engines"
        return _compare(
            "training", option, float(seconds[least]), chosen, against=against, is_unfit=not fitting
        )

    fit: list[Alternative] = []
    unfit: list[Alternative] = []
    for sizes, indices in by_sizes.items():
        if sizes != chosen_layout.sizes:
            group = fit if find_fitting(indices) else unfit
            group.append(describe(sizes, indices))
    fit.sort(key=_seconds)
    # Of layouts that do not fit, show the simplest, and the fastest.
    fastest = [
        layout for layout in unfit[_MOST_LAYOUTS:] if _seconds(layout) < chosen.training.seconds
    ]
    fastest.sort(key=_seconds)
    yield from fit[:_MOST_LAYOUTS]
    yield from unfit[:_MOST_LAYOUTS]
    yield from fastest[:_MOST_LAYOUTS]
    if chosen_layout.gradient_checkpointing:
        yield describe(
            "no recomputation",
            [i for i in by_sizes[chosen_layout.sizes] if not layouts.recompute[i]],
        )


def _not_written(candidates: Candidates, chosen: Candidate) -> Iterator[Alternative]:
    """Yield the fastest layout that fits and that gcore-llm has no settings for."""
    options = TrainingOptions(replace(candidates.setting, runnable=False), chosen.num_devices)
    fits = ~options.layouts.sharded & (options.total_bytes <= candidates.setting.usable_bytes)
    if candidates.setting.state.offload != "none" or not fits.any():
        return
    seconds = np.where(fits, options.offloaded_s, inf)
    fastest = int(seconds.argmin())
    against = "no settings are written for it (--all-layouts)"
    yield _compare(
        "training", options.layouts[fastest].sizes, float(seconds[fastest]), chosen, against=against
    )


def _adapters(candidates: Candidates, chosen: Candidate) -> Iterator[Alternative]:
    """Yield the alternative of adapters if all parameters are trained, and the reverse."""
    policy = candidates.setting.job.policy
    usable = candidates.setting.usable_bytes
    has_adapters = bool(candidates.setting.state.adapter_parameters)
    adapters = policy.adapter_parameters(LORA_RANK)
    state = TrainingState(adapter_parameters=0 if has_adapters else adapters)
    options = TrainingOptions(replace(candidates.setting, state=state), chosen.num_devices)
    fits = options.total_bytes <= usable
    seconds = np.where(fits, options.offloaded_s, inf)
    option = "all"
    against = ""
    if not has_adapters:
        option = f"LoRA of rank {LORA_RANK}"
        against = f"trains {adapters / 1e6:,.1f} million of {policy.num_parameters / 1e9:.2f} billion parameters"
    unfit = _over(float(options.total_bytes.min()), usable)
    least = float(seconds.min())
    yield _compare("trained parameters", option, least, chosen, against=against, unfit=unfit)


def _over(needs: float, usable: float, of: str = "") -> str:
    """Describe by how many bytes a device's memory is exceeded."""
    largest = f"; {of}" if of else ""
    return f"does not fit: {gigabytes(needs - usable)} over the {gigabytes(usable)} of each device{largest}"


def _seconds(alternative: Alternative) -> float:
    return inf if alternative.seconds is None else alternative.seconds


def _compare(
    choice: str,
    option: str,
    seconds: float,
    chosen: Candidate,
    *,
    against: str = "",
    is_unfit: bool = False,
    unfit: str = "does not fit",
) -> Alternative:
    """Return an alternative with its seconds against the plan's, and the reason against it, first if it is unfit.

    ``unfit`` is the reason of one without seconds.
    """
    if seconds == inf:
        return Alternative(choice=choice, option=option, reason=unfit)
    chosen_s = chosen.step_s
    unit = "a step"
    if choice in ("training", "trained parameters"):
        chosen_s = chosen.training.seconds
        unit = "to train"
    difference_s = seconds - chosen_s
    if not against and abs(difference_s) < PREDICTION_ERROR * chosen.step_s:
        against = "within the prediction's error"
    reason = f"{seconds:.1f} s {unit}, {difference_s:+.1f} s"
    if is_unfit:
        reason = f"{against}; {reason}"
    elif against:
        reason = f"{reason}; {against}"
    return Alternative(
        choice=choice, option=option, reason=reason, seconds=seconds, difference_s=difference_s
    )
