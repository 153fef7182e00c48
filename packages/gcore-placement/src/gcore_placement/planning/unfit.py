"""Jobs that do not fit: forms of training that take less memory, and the error that names what would fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from gcore_placement.cluster import DEVICES, Cluster
from gcore_placement.errors import PlacementError
from gcore_placement.planning.candidates import Candidates
from gcore_placement.planning.layouts import Setting, TrainingState
from gcore_placement.planning.options import TrainingOptions
from gcore_placement.quantities import gigabytes
from gcore_placement.strategies import Strategy
from gcore_placement.workload.model_shape import ModelShape

LORA_RANK = 16
"""Rank of the adapters where none is given."""
_MOST_DOUBLINGS = 6
"""Doublings of the devices, or halvings of the responses, to try in search of a job that fits."""


def settings_to_try(setting: Setting, lora_rank: int | None) -> list[Setting]:
    """Return the setting in the forms of training that may be planned, in the order of preference.

    All parameters are trained, with the optimizer's state on the devices or in the host's memory; or adapters are.
    """
    if not setting.runnable and lora_rank is None:
        return [setting]
    adapters = setting.job.policy.adapter_parameters(lora_rank or LORA_RANK)
    whole = TrainingState()
    lora = TrainingState(adapter_parameters=adapters)
    states = [lora] if lora_rank else [whole, TrainingState(offload="optimizer")]
    if lora_rank is None:
        states.append(lora)
    return [replace(setting, state=state) for state in states]


def least_training_bytes(setting: Setting, num_devices: int) -> float:
    """Return the bytes of each of so many devices that training all parameters needs at least."""
    return float(TrainingOptions(replace(setting, state=TrainingState()), num_devices).total_bytes.min())


def nothing_fits(settings: Sequence[Setting], strategy: Strategy | None) -> PlacementError:
    """Return the error of a job that fits in none of its settings: what is too large, and what would fit."""
    cluster = settings[0].cluster
    usable = settings[0].usable_bytes
    host = gigabytes(cluster.host_memory_bytes)
    lines = [*_too_large(settings)] or [f"roles do not fit on the same devices, nor states into {host} of the host"]
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
    return "all parameters" + (", the optimizer's state on the host" if state.offload != "none" else "")


def _too_large(settings: Sequence[Setting]) -> Iterator[str]:
    known = [Candidates(setting) for setting in settings]
    cluster = settings[0].cluster
    usable = settings[0].usable_bytes
    size = next(size for size in cluster.sizes() if len(known[0].training(size).layouts))
    for each in known:
        options = each.training(size)
        smallest = int(options.total_bytes.argmin())
        if options.total_bytes[smallest] <= usable:
            synced = [
                each.sync_bytes(policy, choice, size)
                for choice in options.choices()
                for policy in each.policy.of(size, usable)
            ]
            if synced and min(synced) > usable:
                needs = gigabytes(min(synced))
                form = form_of(each.setting.state)
                yield f"with {form} weights pass to the engine in {needs}, both of them on the device"
            continue
        needs = gigabytes(options.total_bytes[smallest])
        if each is known[0]:
            parts = sorted(((float(v[smallest]), k) for k, v in options.memory.items()), reverse=True)[:3]
            most = ", ".join(f"{name} {gigabytes(size)}" for size, name in parts)
            yield f"training needs at least {needs} on each device ({most}; {options.layouts[smallest]})"
        else:
            yield f"with {form_of(each.setting.state)} {needs}"
    for name, engines in (("policy", known[0].policy), ("judge", known[0].judge)):
        if engines is not None:
            needs, tp = min((engines.least_bytes(tp), tp) for tp in engines.sizes(size))
            if needs > usable:
                yield f"an engine of the {name} needs {gigabytes(needs)} on each device even at TP {tp}"


def _what_would_fit(settings: Sequence[Setting], strategy: Strategy | None) -> Iterator[str]:
    def fitting(num_forms: int = len(settings), **changed: Any) -> str | None:
        """Return the form of training under which the changed job fits, the first that does."""
        for setting in settings[:num_forms]:
            known = Candidates(replace(setting, **changed))
            if any(True for size in known.setting.cluster.sizes() for _ in known.of(size, strategy)):
                return f" ({form_of(setting.state)})" if setting is not settings[0] else ""
        return None

    cluster = settings[0].cluster
    job = settings[0].job
    if count := _fewest_devices(cluster, fitting):
        form = fitting(cluster=replace(cluster, num_devices=count))
        yield f"{count} devices{form}"
        if form and (whole := _fewest_devices(cluster, partial(fitting, 1))):
            yield f"{whole} devices (all parameters)"
    memory_bytes = cluster.device.memory_bytes
    larger = sorted((d for d in DEVICES.values() if d.memory_bytes > memory_bytes), key=lambda d: d.memory_bytes)
    for device in larger:
        if (form := fitting(cluster=replace(cluster, device=device))) is not None:
            yield f"{cluster.num_devices} x {device.name} of {gigabytes(device.memory_bytes)}{form}"
            break
    layers = job.policy.workload.num_hidden_layers
    # Depths that more pipeline stages divide are no concern: a rank of FSDP has a part of each layer.
    depth = _largest(layers - 1, lambda depth: fitting(job=replace(job, policy=_cut(job.policy, depth))) is not None)
    if depth:
        cut = _cut(job.policy, depth)
        form = fitting(job=replace(job, policy=cut))
        yield f"a policy of {depth} of these {layers} layers, {cut.num_parameters / 1e9:.1f} B parameters{form}"
    lengths = job.response_lengths
    for halvings in range(1, _MOST_DOUBLINGS + 1):
        longest = lengths.longest / 2**halvings
        if (form := fitting(job=replace(job, response_lengths=lengths.cut(longest)))) is not None:
            yield f"responses of at most {int(longest)} tokens{form}"
            break


def _fewest_devices(cluster: Cluster, fitting: Callable[..., str | None]) -> int | None:
    """Return the least number of devices that would do, part of a node or whole nodes."""
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        most = replace(cluster, num_devices=cluster.num_devices * 2**doublings)
        if fitting(cluster=most) is None:
            continue
        sizes = [size for size in most.sizes() if size > most.num_devices // 2]

        def fits(place: int, sizes: Sequence[int] = sizes) -> bool:
            return fitting(cluster=replace(cluster, num_devices=sizes[place])) is not None

        # The largest is known to fit.
        return sizes[_largest(len(sizes) - 1, fits)]
    return None


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number up to ``most`` for which a property of all smaller ones, too, holds; 0 if none."""
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if holds(middle) else (least, middle - 1)
    return least


def _cut(model: ModelShape, depth: int) -> ModelShape:
    """Return the model with its first layers alone."""
    w = model.workload
    layers = {
        "num_hidden_layers": depth,
        "num_moe_layers": int(np.ceil(w.num_moe_layers * depth / w.num_hidden_layers)),
    }
    return replace(model, workload=replace(w, **layers))
