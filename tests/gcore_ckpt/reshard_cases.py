"""What the ranks do in `test_resharding.py`: build sharded states from plain descriptions, save, load and compare.

A description is a tree of dict, list and tuple whose leaves are small values or a `SimpleNamespace`:

    kind       "tensor", or "per_rank": a value, or a tensor that differs from rank to rank
    dtype, shape, seed                  of the global tensor, whose bytes are random
    name       unique; a tensor that is held as named boxes has no other name
    wrapped    whether it lies in a dict of its own, of which a rank may hold no key or several
    layout     ("plain", ranks) | ("array", ranks) | ("dtensor", mesh, placements) | ("box", boxes) | ("boxes", boxes)
               where boxes is, for each rank, a list of (offset, extent); "box" is one each, without the tensor's name
    strided    whether a rank's memory has gaps
    meta       whether it is a tensor without memory; only in templates
"""

import errno
import math
import os
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import Lock
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import numpy.random
import torch
import torch._dynamo
import transformers.models.qwen3.modeling_qwen3
from rank import Rank, mesh
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard as PartOfShardedTensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard as ShardPlacement,
    distribute_tensor,
)
from transformers import AutoModelForCausalLM

import gcore_ckpt.loading.loader
import gcore_ckpt.ranks.dtensor
import gcore_ckpt.saving.pipeline
from gcore_ckpt import Checkpointer, CheckpointError, PerRank, Shard, verify
from gcore_ckpt.format.boxes import BLOCK_BYTES, lay_out
from gcore_ckpt.saving.staging import CHUNK_BYTES
from gcore_ckpt.storage.local import LocalFiles, LocalStorage

PRELOADED = (
    numpy.random,
    torch._dynamo,
    transformers.models.qwen3.modeling_qwen3,
    gcore_ckpt.ranks.dtensor,
    gcore_ckpt.loading.loader,
    gcore_ckpt.saving.pipeline,
)
"""What a rank would import on its first save or load; imported here, once."""

TIMEOUT_S = 20.0
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

MESHES = [(1,), (2,), (3,), (4,), (2, 2), (1, 2), (2, 1), (1, 3), (1, 4), (4, 1)]


def make_meshes(rank: Rank) -> None:
    """All ranks make meshes together, also those that are not in them."""
    for shape in MESHES:
        mesh(shape)


def checkpointer(rank: Rank, path: str, size: int, **options: Any) -> Checkpointer:
    return Checkpointer(path, process_group=rank.groups[size], timeout_s=TIMEOUT_S, **options)


@contextmanager
def small_sizes(block_bytes: int | None = None, chunk_bytes: int | None = None) -> Generator[None]:
    """Blocks and staging buffers of a size that small tensors fill."""
    block_bytes = block_bytes or BLOCK_BYTES
    with (
        mock.patch("gcore_ckpt.saving.saver.BLOCK_BYTES", block_bytes),
        mock.patch("gcore_ckpt.format.index.BLOCK_BYTES", block_bytes),
        mock.patch("gcore_ckpt.saving.staging.CHUNK_BYTES", chunk_bytes or CHUNK_BYTES),
    ):
        yield


def save(
    rank: Rank,
    path: str,
    step: int,
    tree: Any,
    size: int,
    options: dict[str, Any],
    block_bytes: int | None = None,
    chunk_bytes: int | None = None,
) -> None:
    with small_sizes(block_bytes, chunk_bytes), checkpointer(rank, path, size, **options) as saver:
        state = build(tree, rank.number)
        saver.save(step, state)
        _overwrite(state)
    if rank.number == 0:
        verify(path, step)


def load_template(rank: Rank, path: str, tree: Any, size: int) -> list[str]:
    """Where the loaded state is not what it should be: not these bits, or not in the template's memory."""
    template = build(tree, rank.number, empty=True)
    found = checkpointer(rank, path, size).load(template)
    return [
        *differences(_without_filled(found, template), build(tree, rank.number)),
        *_moved(found, template),
    ]


def _without_filled(found: Any, template: Any) -> Any:
    """The loaded state without what came where the template has an empty dict, as of a rank that holds nothing."""
    match found:
        case dict():
            return {
                key: _without_filled(value, template[key])
                for key, value in found.items()
                if key in template
            }
        case list() | tuple():
            return type(found)(
                _without_filled(one, other) for one, other in zip(found, template, strict=True)
            )
        case PerRank():
            return PerRank(_without_filled(found.value, template.value))
        case _:
            return found


def load_whole(rank: Rank, path: str, tree: Any, size: int, only: list[str] | None) -> list[str]:
    found = checkpointer(rank, path, size).load(only=only)
    return differences(found, whole(tree, rank.number))


def load_as(rank: Rank, path: str, leaf: Any, dtype: str, size: int) -> bool:
    """Whether a tensor that is loaded as another dtype has the values that torch converts it to."""
    template = build(SimpleNamespace(**vars(leaf) | {"dtype": dtype}), rank.number, empty=True)
    found = _local(checkpointer(rank, path, size).load({"x": template})["x"])
    return torch.equal(found, _local(build(leaf, rank.number)).to(getattr(torch, dtype)))


def save_each(
    rank: Rank, path: str, trees: dict[int, Any], size: int, options: dict[str, Any]
) -> list[bool]:
    """Saves a tree as each step with one checkpointer; gives for which of them this rank made its plan again."""
    remade: list[bool] = []
    with (
        checkpointer(rank, path, size, **options) as saver,
        mock.patch("gcore_ckpt.saving.planner.lay_out", side_effect=lay_out) as counted,
    ):
        for step, tree in trees.items():
            before = counted.call_count
            saver.save(step, build(tree, rank.number)).wait()
            remade.append(counted.call_count > before)
    return remade


def bytes_read_by_load(rank: Rank, path: str, tree: Any, size: int) -> int:
    """How many bytes of data files a load reads, headers too."""
    read_into, total = LocalFiles.read_into, 0
    lock = Lock()

    def count(files: LocalFiles, name: str, offset_bytes: int, buffer: memoryview) -> int:
        nonlocal total
        with lock:
            total += len(buffer)
        return read_into(files, name, offset_bytes, buffer)

    with mock.patch.object(LocalFiles, "read_into", count):
        assert load_template(rank, path, tree, size) == []
    return total


def save_after_failure(
    rank: Rank,
    path: str,
    steps: list[int],
    trees: list[Any],
    size: int,
    failing_disk: int | None = None,
) -> str:
    """The error of a save, the same at a second try; each rank has its own step and tree. Then step 9 is saved."""
    disk_full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with checkpointer(rank, path, size) as saver:
        with (
            mock.patch.object(LocalStorage, "write_file", side_effect=disk_full)
            if failing_disk == rank.number
            else (nullcontext())
        ):
            messages: list[str] = []
            for _ in range(2):
                try:
                    saver.save(steps[rank.number], build(trees[rank.number], rank.number)).wait()
                    messages.append("")
                except (ValueError, TypeError, CheckpointError) as error:
                    messages.append(f"{type(error).__name__}: {error}")
        saver.save(9, {"x": torch.arange(4)}).wait()
    assert messages[0] == messages[1]
    return messages[0]


def save_tied(rank: Rank, path: str, kinds: list[str]) -> list[Any]:
    """Save a tensor and its transpose, which each rank has of a kind of its own; return whether it is tied, and it."""
    w = torch.arange(6.0).view(2, 3)
    transposes: dict[str, Any] = {
        "view": w.t(),
        "own": w.t().clone(),
        "flat": w.view(-1),
        "wide": w.t().double(),
        "number": 3,
    }
    with checkpointer(rank, path, len(kinds)) as saving:
        saving.save(1, {"w": w, "turned": transposes[kinds[rank.number]]}).wait()
        found = saving.load()
    return [found["w"].data_ptr() == found["turned"].data_ptr(), found["turned"].tolist()]


def load_own(rank: Rank, path: str, trees: list[Any], size: int) -> list[str]:
    """Loads into a template that is each rank's own."""
    return load_template(rank, path, trees[rank.number], size)


def load_plain(rank: Rank, path: str, size: int) -> Any:
    return checkpointer(rank, path, size).load()


def train_fsdp_and_save(rank: Rank, path: str, size: int, step_count: int) -> Any:
    return _train_with_fsdp(rank, path, size, resume=False, step_count=step_count)


def load_and_train_fsdp(rank: Rank, path: str, size: int, step_count: int) -> Any:
    return _train_with_fsdp(rank, path, size, resume=True, step_count=step_count)


def _train_with_fsdp(
    rank: Rank, path: str, size: int, *, resume: bool, step_count: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Trains a model that is sharded over the ranks; saves after all steps but the last, or begins with a load.

    Returns:
        The full parameters at the time of the save or load, and at the end.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(10, 7), torch.nn.ReLU(), torch.nn.Linear(7, 5, bias=False)
    )
    for layer in model:
        fully_shard(layer, mesh=mesh((size,)))
    fully_shard(model, mesh=mesh((size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs = torch.randn(step_count, 6, 10, generator=torch.Generator().manual_seed(1))
    first = step_count - 1 if resume else 0
    between: dict[str, torch.Tensor] = {}
    with checkpointer(rank, path, size) as saver:
        for step in range(first, step_count):
            if step == step_count - 1:
                weights, moments = get_state_dict(model, optimizer)
                state = {"model": weights, "optimizer": moments}
                if resume:
                    state = saver.load(state)
                    set_state_dict(
                        model,
                        optimizer,
                        model_state_dict=state["model"],
                        optim_state_dict=state["optimizer"],
                    )
                else:
                    saver.save(step, state)
                between = _full(model)
            model(inputs[step]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return between, _full(model)


def save_fsdp_optimizer(rank: Rank, path: str, size: int) -> None:
    model, optimizer = _sharded_model(size)
    model(torch.ones(6, 10)).square().mean().backward()
    optimizer.step()
    with checkpointer(rank, path, size) as saver:
        saver.save(1, {"optim": optimizer.state_dict()})


def load_fsdp_optimizer(rank: Rank, path: str, size: int, is_prepared: bool) -> list[torch.Tensor]:
    """Load into an optimizer before its first step, with its state made or not; return all of it, gathered."""
    model, optimizer = _sharded_model(size)
    if is_prepared:
        get_optimizer_state_dict(model, optimizer)
    loaded = checkpointer(rank, path, size).load({"optim": optimizer.state_dict()})
    optimizer.load_state_dict(loaded["optim"])
    model(torch.ones(6, 10)).square().mean().backward()
    optimizer.step()  # refuses tensors of another kind than the parameters
    return [cast("DTensor", state["exp_avg"]).full_tensor() for state in optimizer.state.values()]


def load_next_to_an_empty_dict(rank: Rank, path: str, size: int) -> Any:
    """Load all of a part on the last rank, which has an object there, and nothing on the others."""
    loaded: list[int] = []

    class Part:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            loaded.append(state["w"].numel())

    is_last = rank.number == size - 1
    state = checkpointer(rank, path, size).load({"part": Part() if is_last else {}})
    return loaded if is_last else state


def load_unfilled(rank: Rank, path: str, size: int) -> tuple[Any, list[str]]:
    """Return what is loaded into an empty dict on all ranks, and what was unused."""
    loading = checkpointer(rank, path, size).load_async({"part": {}}, strict=False)
    return loading.wait(), loading.report.unused


def _sharded_model(size: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(10, 7)
    fully_shard(model, mesh=mesh((size,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _full(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters = {name: cast("DTensor", parameter) for name, parameter in model.named_parameters()}
    return {
        name: parameter.full_tensor().detach().clone() for name, parameter in parameters.items()
    }


def save_fsdp_of_transformers(rank: Rank, model: str, path: str, size: int) -> None:
    """Saves a model of transformers, its weights sharded by FSDP2 and trained a step."""
    policy = AutoModelForCausalLM.from_pretrained(model)
    for layer in policy.model.layers:
        fully_shard(layer, mesh=mesh((size,)))
    fully_shard(policy, mesh=mesh((size,)))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    tokens = torch.arange(12).view(2, 6)
    policy(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    with checkpointer(rank, path, size) as saver:
        saver.save(1, {"model": policy.state_dict(), "step": 1})


def save_fsdp_over_tp(rank: Rank, path: str, rows: int) -> str:
    """Saves weights as FSDP2 over tensor parallelism shards them; returns their placements."""
    both = mesh((2, 2))
    layer = torch.nn.Linear(3, rows)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(rows * 3.0).view(rows, 3))
        layer.bias.copy_(torch.arange(float(rows)))
    for name, parameter in list(layer.named_parameters()):
        placed = distribute_tensor(
            parameter.detach(), both["tp"], [ShardPlacement(0)], src_data_rank=None
        )
        layer.register_parameter(name, torch.nn.Parameter(placed))
    fully_shard(layer, mesh=both["dp"])
    with checkpointer(rank, path, 4) as saver:
        saver.save(1, layer.state_dict())
    return str(cast("DTensor", layer.weight).placements)


def megatron_state(rank: int, tp_size: int, *, empty: bool) -> dict[str, Any]:
    """Two layers of one key, split among `tp_size` ranks, and a norm that all have."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    whole_weight = torch.arange(2 * 12 * 4.0).view(2, 12, 4)
    rows = 12 // tp_size
    state: dict[str, Any] = {}
    for layer in range(2):
        data = whole_weight[layer, rank * rows : (rank + 1) * rows].clone()
        state[f"layers.{layer}.weight"] = ShardedTensor.from_rank_offsets(
            "layers.weight",
            torch.zeros_like(data) if empty else data,
            (0, layer, 2),
            (1, rank, tp_size),
            prepend_axis_num=1,
            replica_id=0,
        )
    norm = torch.zeros(4) if empty else torch.arange(4.0)
    state["norm"] = ShardedTensor.from_rank_offsets("norm", norm, replica_id=rank)
    return {"model": state, "iteration": None if empty else 7}


def save_megatron(rank: Rank, path: str, size: int) -> None:
    with checkpointer(rank, path, size) as saver:
        saver.save(1, megatron_state(rank.number, size, empty=False))


def load_megatron(rank: Rank, path: str, size: int) -> list[bool]:
    """Whether each tensor has what it should; the memory of the template is what was filled."""
    template = megatron_state(rank.number, size, empty=True)
    found = checkpointer(rank, path, size).load(template)
    expected = megatron_state(rank.number, size, empty=False)
    assert found["iteration"] == 7
    return [
        torch.equal(template["model"][key].data, part.data)
        for key, part in expected["model"].items()
    ]


def save_fsdp1(rank: Rank, path: str, size: int) -> None:
    with checkpointer(rank, path, size) as saver:
        saver.save(1, {"w": _sharded_tensor(rank, size, 1.0)})


def load_fsdp1(rank: Rank, path: str, size: int) -> bool:
    """Whether this rank's rows are what was saved; the memory of the template is what was filled."""
    template = {"w": _sharded_tensor(rank, size, 0.0)}
    found = checkpointer(rank, path, size).load(template)
    expected = _sharded_tensor(rank, size, 1.0).local_shards()[0].tensor
    return found["w"] is template["w"] and torch.equal(
        template["w"].local_shards()[0].tensor, expected
    )


def _sharded_tensor(rank: Rank, size: int, factor: float) -> Any:
    """A tensor as in state dicts of the first FSDP, of six rows, of which each rank has as many."""
    rows = 6 // size
    first = rank.number * rows
    local = torch.arange(first * 4.0, (first + rows) * 4.0).view(rows, 4) * factor
    metadata = ShardMetadata([first, 0], [rows, 4], f"rank:{rank.number}/cpu")
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        parts = [PartOfShardedTensor(local, metadata)]
        return sharded_tensor.init_from_local_shards(parts, (6, 4), process_group=rank.groups[size])


def build(tree: Any, rank: int, *, empty: bool = False) -> Any:
    """What a rank holds of the described state; `empty` holds other bits, None for small values."""
    match tree:
        case dict():
            return {key: build(value, rank, empty=empty) for key, value in tree.items()}
        case list():
            return [build(item, rank, empty=empty) for item in tree]
        case tuple():
            return tuple(build(item, rank, empty=empty) for item in tree)
        case _ if not hasattr(tree, "kind"):
            return None if empty else tree
        case _ if tree.kind == "per_rank":
            return PerRank(_own_value(tree, rank, empty=empty))
        case _:
            held = _held(tree, rank, empty=empty)
            return held if tree.wrapped else held[tree.name]


def whole(tree: Any, rank: int) -> Any:
    """The described state as it is loaded without a template."""
    match tree:
        case dict():
            return {key: whole(value, rank) for key, value in tree.items()}
        case list():
            return [whole(item, rank) for item in tree]
        case tuple():
            return tuple(whole(item, rank) for item in tree)
        case _ if not hasattr(tree, "kind"):
            return tree
        case _ if tree.kind == "per_rank":
            return _own_value(tree, rank, empty=False)
        case _:
            full = full_tensor(tree)
            value = as_numpy(full) if tree.layout[0] == "array" else full
            return {tree.name: value} if tree.wrapped else value


def full_tensor(leaf: Any, salt: int = 0) -> torch.Tensor:
    """The whole tensor that a leaf describes."""
    dtype: torch.dtype = getattr(torch, leaf.dtype)
    data = bytearray(
        np.random.default_rng([leaf.seed, salt]).bytes(math.prod(leaf.shape) * dtype.itemsize + 1)
    )
    if dtype == torch.bool:
        data = bytearray(byte & 1 for byte in data)
    elif dtype.is_floating_point and getattr(leaf, "finite", False):
        return torch.randn(leaf.shape, generator=torch.Generator().manual_seed(leaf.seed)).to(dtype)
    return torch.frombuffer(data, dtype=torch.uint8)[:-1].clone().view(dtype).view(leaf.shape)


def as_numpy(tensor: torch.Tensor) -> Any:
    return tensor.numpy()


def _own_value(leaf: Any, rank: int, *, empty: bool) -> Any:
    if hasattr(leaf, "values"):
        return None if empty else leaf.values[rank]
    return _memory(full_tensor(leaf, 1 + rank), leaf, empty=empty)


def _held(leaf: Any, rank: int, *, empty: bool) -> dict[str, Any]:
    """The keys that a rank holds of a tensor."""
    full = full_tensor(leaf)
    local: Callable[[torch.Tensor], torch.Tensor] = partial(_memory, leaf=leaf, empty=empty)
    match leaf.layout:
        case ("plain", ranks):
            return {leaf.name: local(full)} if rank in ranks else {}
        case ("array", ranks):
            return {leaf.name: as_numpy(local(full))} if rank in ranks else {}
        case ("dtensor", shape, placements):
            return {
                leaf.name: _dtensor(full, mesh(shape), [_placement(p) for p in placements], local)
            }
        case ("box", boxes):
            [(offset, extent)] = boxes[rank]
            return {
                leaf.name: Shard(
                    global_shape=leaf.shape,
                    offset=offset,
                    tensor=local(_part(full, offset, extent)),
                )
            }
        case ("boxes", boxes):
            return {
                f"part {number}": Shard(
                    global_shape=leaf.shape,
                    offset=offset,
                    tensor=local(_part(full, offset, extent)),
                    name=leaf.name,
                )
                for number, (offset, extent) in enumerate(boxes[rank])
            }
        case _:
            raise ValueError(leaf.layout)


def _dtensor(
    full: torch.Tensor,
    device_mesh: DeviceMesh,
    placements: list[Placement],
    local: Callable[[torch.Tensor], torch.Tensor],
) -> DTensor:
    bits = full.view(_AS_INTEGERS[full.element_size()]) if full.numel() else full
    part = distribute_tensor(bits, device_mesh, placements, src_data_rank=None).to_local()
    return DTensor.from_local(
        local(part.view(full.dtype)),
        device_mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def _placement(text: str) -> Placement:
    match text:
        case "R":
            return Replicate()
        case "P":
            return Partial()
        case _:
            return ShardPlacement(int(text.removeprefix("S")))


def _part(full: torch.Tensor, offset: tuple[int, ...], extent: tuple[int, ...]) -> torch.Tensor:
    return full[
        tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))
    ]


def _memory(data: torch.Tensor, leaf: Any, *, empty: bool) -> torch.Tensor:
    """New memory for these elements; with `empty`, of other bits."""
    if empty and getattr(leaf, "meta", False):
        return torch.empty(data.shape, dtype=data.dtype, device="meta")
    steps = [2 if leaf.strided else 1] * data.ndim
    extents = [size * step for size, step in zip(data.shape, steps, strict=True)]
    wide = (
        torch.zeros(math.prod(extents) * data.element_size(), dtype=torch.uint8)
        .view(data.dtype)
        .view(extents)
    )
    memory = wide[tuple(slice(None, None, step) for step in steps)]
    memory.copy_(data)
    if empty and memory.numel():
        as_integers = memory.view(_AS_INTEGERS[memory.element_size()])
        as_integers.bitwise_xor_(1)
    return memory


def _local(leaf: Any) -> Any:
    match leaf:
        case PerRank():
            return _local(leaf.value)
        case DTensor():
            return leaf.to_local()
        case Shard():
            return leaf.tensor
        case _:
            return leaf


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Where two states differ in type, structure or any bit."""
    if isinstance(expected, PerRank):
        expected = expected.value
    if type(found) is not type(expected):
        return [f"{path}: {type(found)}; expected {type(expected)}"]
    match expected:
        case dict():
            if sorted(map(repr, found)) != sorted(map(repr, expected)):
                return [f"{path}: keys {list(found)}; expected {list(expected)}"]
            return [
                d
                for key in expected
                for d in differences(found[key], expected[key], f"{path}.{key}")
            ]
        case list() | tuple():
            if len(found) != len(expected):
                return [f"{path}: {len(found)} items; expected {len(expected)}"]
            pairs = zip(found, expected, strict=True)
            return [d for i, pair in enumerate(pairs) for d in differences(*pair, f"{path}.{i}")]
        case torch.Tensor() | Shard() | np.ndarray():
            return [] if _bits(found) == _bits(expected) else [f"{path}: other bits"]
        case _:
            return [] if found == expected else [f"{path}: {found!r}; expected {expected!r}"]


def _bits(leaf: Any) -> tuple[Any, ...]:
    local = _local(leaf)
    if isinstance(local, np.ndarray):
        return local.dtype, local.shape, local.tobytes()
    placement = (
        (leaf.placements, tuple(leaf.shape), leaf.stride()) if isinstance(leaf, DTensor) else ()
    )
    dense = torch.empty(local.nbytes, dtype=torch.uint8)
    dense.view(local.dtype).view(local.shape).copy_(local.detach())
    return local.dtype, tuple(local.shape), dense.numpy().tobytes(), *placement


def leaves(state: Any) -> Iterator[Any]:
    match state:
        case dict():
            for value in state.values():
                yield from leaves(value)
        case list() | tuple():
            for item in state:
                yield from leaves(item)
        case PerRank():
            yield from leaves(state.value)
        case _:
            yield state


def _overwrite(state: Any) -> None:
    """What training does as soon as a save returns."""
    for local in map(_local, leaves(state)):
        if isinstance(local, torch.Tensor) and local.numel():
            local.view(_AS_INTEGERS[local.element_size()]).zero_()
        elif isinstance(local, np.ndarray):
            local[...] = 0


def _moved(found: Any, template: Any) -> list[str]:
    """Tensors of the template that were not filled in place."""
    places = {
        local.data_ptr() for local in map(_local, leaves(found)) if isinstance(local, torch.Tensor)
    }
    moved = 0
    for local in map(_local, leaves(template)):
        if isinstance(local, torch.Tensor) and not local.is_meta and local.numel():
            moved += local.data_ptr() not in places
    return [f"{moved} tensors were not filled in place"] if moved else []
