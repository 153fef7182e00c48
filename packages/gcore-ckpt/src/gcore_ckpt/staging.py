"""Copies a live state into host memory, the only part of a save that its caller waits for."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from gcore_ckpt.data_file import Placement, TensorSpec, place
from gcore_ckpt.dtypes import DTYPES
from gcore_ckpt.tree import Node, State, StatePath, describe, encode

_NumpyArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_TORCH_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}
_NUMPY_NAMES = {np.dtype(name): name for name, dtype in DTYPES.items() if dtype.in_numpy}


@dataclass(frozen=True, kw_only=True)
class StagedState:
    """A state that no longer depends on live memory: its tree, and its tensors' bytes as they will lie in the file."""

    tree: Node
    tensors: Mapping[str, TensorSpec]
    placement: Placement
    data: memoryview


class StagingBuffer:
    """Host memory for one save at a time, kept from save to save; pinned once a state on a CUDA device comes by."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def stage(self, state: State) -> StagedState:
        """Copies `state`; it is valid until the next call. The caller may change `state` as soon as this returns.

        Raises:
            TypeError, ValueError: The state cannot be saved, with the path of the offending leaf.
        """
        leaves = _Leaves()
        tree = encode(state, leaves.add)
        placement = place(leaves.specs)
        self._reserve(placement.size_bytes, pinned=any(tensor.is_cuda for tensor in leaves.tensors.values()))
        self._copy(leaves, placement)
        data = self._buffer.numpy().data[: placement.size_bytes]
        return StagedState(tree=tree, tensors=leaves.specs, placement=placement, data=data)

    def _reserve(self, size_bytes: int, *, pinned: bool) -> None:
        if len(self._buffer) < size_bytes or (pinned and not self._pinned):
            self._pinned = self._pinned or pinned
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old memory goes before the new comes
            self._buffer = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    @torch.no_grad()
    def _copy(self, leaves: "_Leaves", placement: Placement) -> None:
        streams: set[torch.cuda.Stream] = set()
        for dtype, run in groupby(placement.offsets, key=lambda key: leaves.specs[key].dtype):
            for key, target in self._targets(dtype, {key: leaves.specs[key] for key in run}, placement):
                if key in leaves.arrays:
                    np.copyto(target.numpy(), leaves.arrays[key])
                    continue
                source = leaves.tensors[key]
                target.copy_(source, non_blocking=source.is_cuda)
                if source.is_cuda:
                    streams.add(torch.cuda.current_stream(source.device))
        for stream in streams:
            stream.synchronize()

    def _targets(
        self, dtype: str, specs: Mapping[str, TensorSpec], placement: Placement
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The places of the tensors of one dtype, which lie side by side: one view for all is what keeps them cheap."""
        start = placement.offsets[next(iter(specs))]
        end = start + sum(spec.size_bytes for spec in specs.values())
        flat = self._buffer[start:end].view(_TORCH_DTYPES[dtype])
        parts = flat.split([math.prod(spec.shape) for spec in specs.values()])
        for (key, spec), part in zip(specs.items(), parts, strict=True):
            yield key, part.view(spec.shape)


class _Leaves:
    """Collects the tensors and arrays of a state under unique keys; views of the same memory share one key."""

    def __init__(self) -> None:
        self.specs: dict[str, TensorSpec] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.arrays: dict[str, _NumpyArray] = {}
        self._key_of_view: dict[tuple[object, ...], str] = {}

    def add(self, leaf: object, path: StatePath) -> Node | None:
        """Encodes a tensor or an array; None for anything else."""
        if isinstance(leaf, torch.Tensor):
            return {"tensor": self._add_tensor(leaf, path)}
        if isinstance(leaf, np.ndarray):
            return {"array": self._add_array(cast("_NumpyArray", leaf), path)}
        return None

    def _add_tensor(self, tensor: torch.Tensor, path: StatePath) -> str:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(
                f"{describe(path)} is a {type(tensor).__name__}; expected a plain torch.Tensor or Parameter"
            )
        if tensor.layout is not torch.strided or tensor.is_meta:
            found = f"layout {tensor.layout} on device {tensor.device}"
            raise TypeError(f"{describe(path)} has {found}; expected a dense tensor that holds data")
        dtype, shape = _TORCH_NAMES.get(tensor.dtype), tuple(tensor.shape)
        if dtype is None:
            raise _dtype_error(path, tensor.dtype, _TORCH_NAMES.values())
        view = (tensor.data_ptr(), tensor.device, dtype, shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        if view not in self._key_of_view:
            key = self._new_key(view, TensorSpec(dtype=dtype, shape=shape), path)
            self.tensors[key] = tensor
        return self._key_of_view[view]

    def _add_array(self, array: _NumpyArray, path: StatePath) -> str:
        if type(array) not in (np.ndarray, np.memmap):
            raise TypeError(f"{describe(path)} is a {type(array).__name__}; expected a plain numpy.ndarray")
        dtype = _NUMPY_NAMES.get(array.dtype)
        if dtype is None:
            raise _dtype_error(path, array.dtype, _NUMPY_NAMES.values())
        view = ("array", array.__array_interface__["data"][0], dtype, array.shape, array.strides)
        if view not in self._key_of_view:
            key = self._new_key(view, TensorSpec(dtype=dtype, shape=array.shape), path)
            self.arrays[key] = array
        return self._key_of_view[view]

    def _new_key(self, view: tuple[object, ...], spec: TensorSpec, path: StatePath) -> str:
        # UTF-8 cannot hold the lone surrogates that a Python str may, and safetensors is UTF-8.
        name = ".".join(map(str, path)).encode("utf-8", "backslashreplace").decode() or "state"
        key, count = name, 1
        while key in self.specs or key == "__metadata__":  # {"a.b": x, "a": {"b": y}}, and safetensors' reserved name
            count += 1
            key = f"{name}#{count}"
        self.specs[key] = spec
        self._key_of_view[view] = key
        return key


def _dtype_error(path: StatePath, dtype: object, accepted: Iterable[str]) -> TypeError:
    return TypeError(f"{describe(path)} has dtype {dtype}; expected one of {', '.join(accepted)}")
