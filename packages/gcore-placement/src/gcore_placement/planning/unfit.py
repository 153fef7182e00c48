"""Jobs that do not fit: forms of training that take less memory, and the error with changes under which they fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from gcore_placement.cluster import DEVICES, Cluster
from gcore_placement.errors import PlacementError
from gcore_placement.planning.candidates import Candidates
from gcore_placement.planning.memory import LORA_RANK, TrainingState, parts_at
from gcore_placement.planning.options import Setting, TrainingOptions
from gcore_placement.quantities import gigabytes
from gcore_placement.strategies import Strategy
from gcore_placement.workload.model_shape import ModelShape

_MOST_DOUBLINGS = 6
"""Doublings of the devices, or halvings of the responses, to try in search of a job that fits."""


def settings_to_try(setting: Setting, lora_rank: int | None) -> list[Setting]:
    """Return the setting with each form of training to try, in the order of preference.

    Train all parameters, with the optimizer's state on the devices or in the host's memory; or train adapters.
    """
    if not setting.runnable and lora_rank is None:
        return [setting]
    adapters = setting.job.policy.adapter_parameters(lora_rank or LORA_RANK)
    states: list[TrainingState] = []
    if not lora_rank:
        states = [TrainingState(), TrainingState(offload="optimizer")]
    if lora_rank != 0:
        states.append(TrainingState(adapter_parameters=adapters))
    return [replace(setting, state=state) for state in states]


def least_training_bytes(setting: Setting, num_devices: int) -> float:
    """Return the least bytes of each device for training all parameters on `num_devices`."""
    return float(
        TrainingOptions(replace(setting, state=TrainingState()), num_devices).total_bytes.min()
    )


def nothing_fits(settings: Sequence[Setting], strategy: Strategy | None) -> PlacementError:
    """Return the error of a job that fits in none of its settings; it names what is too large, and what would fit."""
    cluster = settings[0].cluster
    usable = settings[0].usable_bytes
    host = gigabytes(cluster.host_memory_bytes)
    lines = list(_too_large(settings)) or [
        f"roles do not fit on the same devices, nor states into {host} of the host"
    ]
    fits = ", or ".join(_what_would_fit(settings, strategy)) or "nothing that was tried"
    memory = gigabytes(cluster.device.memory_bytes)
    free = gigabytes(usable)
    return PlacementError(
        f"nothing fits on {cluster.num_devices} x {cluster.device.name}, of whose {memory} {free} are usable: "
        f"{'; '.join(lines)}. Would fit: {fits}"
    )


def form_of(state: TrainingState) -> str:
    """Return the form of training as text."""
    if state.adapter_parameters:
        return "LoRA"
    if state.offload != "none":
        return "all parameters, the optimizer's state on the host"
    return "all parameters"


def _too_large(settings: Sequence[Setting]) -> Iterator[str]:
    forms = [Candidates(setting) for setting in settings]
    first = forms[0]
    usable = first.setting.usable_bytes
    size = next(size for size in first.setting.cluster.sizes() if len(first.training(size).layouts))
    for candidates in forms:
        options = candidates.training(size)
        smallest = int(options.total_bytes.argmin())
        needs = gigabytes(options.total_bytes[smallest])
        if options.total_bytes[smallest] <= usable:
            sync_bytes: list[float] = []
            for choice, policy in product(options.choices(), candidates.policy.of(size, usable)):
                sync_bytes.append(candidates.sync_bytes(policy, choice, size))
            if sync_bytes and min(sync_bytes) > usable:
                needs = gigabytes(min(sync_bytes))
                form = form_of(candidates.setting.state)
                yield f"with {form} weights pass to the engine in {needs}, both of them on the device"
        elif candidates is first:
            parts = [
                (part_bytes, name)
                for name, part_bytes in parts_at(options.memory, smallest).items()
            ]
            parts.sort(reverse=True)
            largest = ", ".join(f"{name} {gigabytes(part_bytes)}" for part_bytes, name in parts[:3])
            yield f"training needs at least {needs} on each device ({largest}; {options.layouts[smallest]})"
        else:
            yield f"with {form_of(candidates.setting.state)} {needs}"
    for name, engines in (("policy", first.policy), ("judge", first.judge)):
        if engines is not None:
            needs, tp = min((engines.least_bytes(tp), tp) for tp in engines.sizes(size))
            if needs > usable:
                yield f"an engine of the {name} needs {gigabytes(needs)} on each device even at TP {tp}"


def _what_would_fit(settings: Sequence[Setting], strategy: Strategy | None) -> Iterator[str]:
    def fitting_form(num_forms: int = len(settings), **changed: Any) -> str | None:
        """Return the first form of training under which the changed job fits."""
        for setting in settings[:num_forms]:
            candidates = Candidates(replace(setting, **changed))
            for size in candidates.setting.cluster.sizes():
                if next(candidates.of(size, strategy), None) is not None:
                    return "" if setting is settings[0] else f" ({form_of(setting.state)})"
        return None

    cluster = settings[0].cluster
    job = settings[0].job
    num_devices = _fewest_devices(cluster, fitting_form)
    if num_devices:
        form = fitting_form(cluster=replace(cluster, num_devices=num_devices))
        yield f"{num_devices} devices{form}"
        num_devices = _fewest_devices(cluster, partial(fitting_form, 1)) if form else None
        if num_devices:
            yield f"{num_devices} devices (all parameters)"
    memory_bytes = cluster.device.memory_bytes
    larger = sorted(
        (d for d in DEVICES.values() if d.memory_bytes > memory_bytes), key=lambda d: d.memory_bytes
    )
    for device in larger:
        form = fitting_form(cluster=replace(cluster, device=device))
        if form is not None:
            yield f"{cluster.num_devices} x {device.name} of {gigabytes(device.memory_bytes)}{form}"
            break
    layers = job.policy.workload.num_hidden_layers
    # A depth need not be divided by pipeline stages: each rank of FSDP has a part of each layer.

    def fits_depth(depth: int) -> bool:
        return fitting_form(job=replace(job, policy=_cut(job.policy, depth))) is not None

    depth = _largest(layers - 1, fits_depth)
    if depth:
        cut = _cut(job.policy, depth)
        form = fitting_form(job=replace(job, policy=cut))
        yield f"a policy of {depth} of these {layers} layers, {cut.num_parameters / 1e9:.1f} B parameters{form}"
    lengths = job.response_lengths
    for halvings in range(1, _MOST_DOUBLINGS + 1):
        longest = lengths.longest / 2**halvings
        form = fitting_form(job=replace(job, response_lengths=lengths.cut(longest)))
        if form is not None:
            yield f"responses of at most {int(longest)} tokens{form}"
            break


def _fewest_devices(cluster: Cluster, fitting_form: Callable[..., str | None]) -> int | None:
    """Return the fewest devices on which the job fits: part of a node, or whole nodes."""
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        doubled = replace(cluster, num_devices=cluster.num_devices * 2**doublings)
        if fitting_form(cluster=doubled) is None:
            continue
        sizes = [size for size in doubled.sizes() if size > doubled.num_devices // 2]

        def fits(index: int, sizes: Sequence[int] = sizes) -> bool:
            return fitting_form(cluster=replace(cluster, num_devices=sizes[index])) is not None

        # The largest is known to fit.
        return sizes[_largest(len(sizes) - 1, fits)]
    return None


def _largest(limit: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number up to ``limit`` for which `holds` is true, as it is for all smaller ones; 0 if none."""
    low = 0
    high = limit
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _cut(model: ModelShape, depth: int) -> ModelShape:
    """Return the model with its first layers alone."""
    w = model.workload
    num_moe_layers = int(np.ceil(w.num_moe_layers * depth / w.num_hidden_layers))
    return replace(
        model, workload=replace(w, num_hidden_layers=depth, num_moe_layers=num_moe_layers)
    )
