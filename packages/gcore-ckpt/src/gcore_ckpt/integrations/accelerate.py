"""Checkpoints of what an Accelerator has prepared: `save_state` and `load_state` in place of its methods."""

from typing import Any

from gcore_ckpt.checkpointer import Checkpointer
from gcore_ckpt.errors import MissingExtraError
from gcore_ckpt.format.tree import PerRank, State
from gcore_ckpt.handles import SaveHandle
from gcore_ckpt.integrations.training import (
    RANDOM_STATES,
    random_states,
    set_random_states,
    state_of_model,
    stateful_optimizer,
)
from gcore_ckpt.loading.reader import Step

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ModuleNotFoundError:
    raise MissingExtraError("accelerate", "accelerate") from None


def save_state(accelerator: Accelerator, checkpointer: Checkpointer, step: int) -> SaveHandle:
    """Start to save all that the Accelerator has prepared, as `Accelerator.save_state` does, and return at once.

    A step holds the models, under the names that they have without wrappers, the optimizers, schedulers and scaler, the
    objects of `register_for_checkpointing`, the positions of the data loaders, and every rank's random number
    generators. Sharded models are those of FSDP2.

    Args:
        accelerator: Has prepared what is to be saved.
        checkpointer: Of the ranks that the Accelerator has.
        step: Number of the step, as in `Checkpointer.save`.

    Raises:
        ValueError: The Accelerator uses DeepSpeed, Megatron-LM or the first FSDP.
        CheckpointError: As `Checkpointer.save` does.
    """
    position = {"step": step, "accumulation_step": accelerator.step}
    parts: dict[str, State] = {**_parts(accelerator), **position}
    parts["models"] = [
        state_of_model(model, accelerator.process_index) for model in parts["models"]
    ]
    parts["dataloaders"] = [
        _loader_state(loader) for loader in _list_prepared(accelerator, "dataloaders")
    ]
    parts["rng"] = random_states()
    return checkpointer.save(step, parts)


def load_state(
    accelerator: Accelerator, checkpointer: Checkpointer, *, step: Step = "latest"
) -> int:
    """Load into what the Accelerator has prepared, in the order in which it was prepared at the save.

    Any number of ranks may load it; another number keeps its own random number generators. As after
    `Accelerator.load_state`, the batches that an epoch has had are skipped by `accelerator.skip_first_batches`.

    Args:
        accelerator: Has prepared the same as at the save.
        checkpointer: Of the ranks that the Accelerator has.
        step: Number of the step; `"latest"` is the highest committed one.

    Returns:
        The number of the step that was loaded.

    Raises:
        CheckpointError: As `Checkpointer.load` does.
    """
    loaders = _list_prepared(accelerator, "dataloaders")
    position = {
        "step": None,
        "accumulation_step": None,
        "dataloaders": [_loader_template(loader) for loader in loaders],
    }
    loaded = checkpointer.load(_parts(accelerator) | position | {"rng": RANDOM_STATES}, step=step)
    accelerator.step = loaded["accumulation_step"]
    for loader, state in zip(loaders, loaded["dataloaders"], strict=True):
        loader.iteration = state["iteration"]
        if "state" in state:
            loader.load_state_dict(state["state"])
    set_random_states(loaded["rng"])
    return loaded["step"]


def _parts(accelerator: Accelerator) -> dict[str, State]:
    distributed_type = accelerator.distributed_type
    if distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"distributed_type is {distributed_type.value!r}; expected DDP, FSDP2 or a single process"
        )
    models = [
        accelerator.unwrap_model(m, keep_torch_compile=False)
        for m in _list_prepared(accelerator, "models")
    ]
    optimizers = _list_prepared(accelerator, "optimizers")
    if models:
        last = len(models) - 1
        optimizers = [
            stateful_optimizer(models[min(i, last)], optimizer)
            for i, optimizer in enumerate(optimizers)
        ]
    scaler = accelerator.scaler
    parts = {
        "models": models,
        "optimizers": optimizers,
        "schedulers": _list_prepared(accelerator, "schedulers"),
        "objects": _list_prepared(accelerator, "custom_objects"),
    }
    return parts if scaler is None else parts | {"scaler": scaler}


def _list_prepared(accelerator: Accelerator, name: str) -> list[Any]:
    """Return the prepared objects of a kind, such as `models`; accelerate has no public name for them."""
    return list(getattr(accelerator, f"_{name}"))


def _loader_state(loader: Any) -> dict[str, State]:
    state: dict[str, State] = {"iteration": getattr(loader, "iteration", 0)}
    if _is_stateful(loader):
        state["state"] = PerRank(loader.state_dict())
    return state


def _loader_template(loader: Any) -> dict[str, State]:
    template: dict[str, State] = {"iteration": None}
    if _is_stateful(loader):
        template["state"] = PerRank(None)
    return template


def _is_stateful(loader: Any) -> bool:
    return getattr(loader, "use_stateful_dataloader", False)
