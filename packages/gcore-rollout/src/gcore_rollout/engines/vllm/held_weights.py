"""Digests of the weights that a vLLM model computes with, read back from vLLM's own layouts; here and on servers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from typing import Any

import torch

from gcore_rollout.engines.vllm.process import (
    TIED_HEAD,
    FusedExperts,
    forget_expert_kernels,
    repack_head,
)
from gcore_rollout.engines.vllm.ranks import gather_tensor
from gcore_rollout.weight_sync.digests import HeldTensor, digest_held_tensor

_ROWS_AT_ONCE = 1024

_EXPERT_PARAMETERS = {("w1", "w3"): "w13_weight", ("w2",): "w2_weight"}
"""vLLM's parameter for the matrices, in its terms, that one fused tensor has of each expert."""


@torch.no_grad()
def held_tensors(
    model: Any,
    *,
    shapes: Mapping[str, Sequence[int]],
    experts: Mapping[str, FusedExperts],
    is_tied: bool,
    names: Sequence[str] | None,
) -> list[HeldTensor]:
    """Digest the weights of a model on one device, but for quantized ones and those in layouts unknown here.

    A tied head is reported as a tensor of its own.

    Args:
        shapes: shapes of the folder's tensors by Hugging Face name, without those that ``experts`` fuses.
        experts: the tensors in which transformers has the experts; see `fused_experts`.
        names: those to digest; None: all.
    """
    if names is None:
        names = [*shapes, *experts]
        if is_tied and TIED_HEAD not in shapes:
            names.append(TIED_HEAD)
    tensors: list[HeldTensor] = []
    for name in names:
        source = name
        try:
            if is_tied and name == TIED_HEAD:
                source = _find_embedding(model, shapes)
            if name in experts:
                read = partial(_read_experts, model, *experts[name])
            else:
                read = partial(_read_published, model, name, shapes[source])
            tensors.append(digest_held_tensor(name, read, source=source))
        except AttributeError:
            # There is no module or parameter of this name: vLLM has made something else of it.
            continue
    return tensors


class TiedHeadWorker:
    """Methods that ``vllm serve --worker-extension-cls gcore_rollout.TiedHeadWorker`` adds to vLLM's workers.

    Example:
        >>> import shlex
        >>> command = ["vllm", "serve", "model", "--enable-scale-out"]
        >>> command += ["--worker-extension-cls", f"gcore_rollout.{TiedHeadWorker.__name__}"]
        >>> shlex.join(command)
        'vllm serve model --enable-scale-out --worker-extension-cls gcore_rollout.TiedHeadWorker'
    """

    model_runner: Any

    def check_worker(self) -> None:
        """Do nothing: `VLLMServerEngine` calls this by its name to see whether these methods are there."""

    def forget_expert_kernels(self) -> None:
        """Prepare a mixture for new weights; `VLLMServerEngine` calls this by its name."""
        forget_expert_kernels(self.model_runner.get_model())

    def repack_tied_head(self) -> None:
        """Pack the head again after weights were loaded; `VLLMServerEngine` calls this by its name."""
        repack_head(self.model_runner.get_model())

    def digest_weights(self, **arguments: Any) -> list[dict[str, Any]]:
        """Return the fields of each `HeldTensor`; `VLLMServerEngine` calls this by its name."""
        return [
            asdict(tensor) for tensor in held_tensors(self.model_runner.get_model(), **arguments)
        ]


def _read_experts(model: Any, shape: Sequence[int], matrices: Sequence[str]) -> torch.Tensor:
    """Read a tensor of all experts [experts, rows of all matrices, columns]; an `AttributeError` if it cannot be found.

    Args:
        matrices: names of the first expert's matrices.
    """
    prefix = matrices[0].partition("experts.0.")[0]
    layer = model.get_submodule(f"{_map_name(model, prefix)}experts.routed_experts")
    shard_by_weight = {weight: shard for _, weight, _, shard in layer.get_expert_mapping()}
    weights = [matrix.removeprefix(prefix).removesuffix("weight") for matrix in matrices]
    shards = tuple(shard_by_weight.get(weight) for weight in weights)
    attribute = _EXPERT_PARAMETERS.get(shards)  # pyright: ignore[reportArgumentType]
    if attribute is None or layer.global_num_experts != shape[0]:
        raise AttributeError(f"vLLM loads {matrices} as {shards}")
    num_matrices = len(matrices)
    width: int = layer.moe_config.intermediate_size_per_partition_unpadded
    # Dimensions are [experts, matrices, rows, columns]; the intermediate one is padded, and divided among ranks.
    dim = 3 if attribute == "w2_weight" else 2
    part = _unpack_experts(layer, attribute).unflatten(1, (num_matrices, -1)).narrow(dim, 0, width)
    full = part.new_zeros(*shape).unflatten(1, (num_matrices, -1))
    if part.shape == full.shape:
        return part.flatten(1, 2)
    if layer.expert_map is None:
        full.narrow(dim, layer.moe_config.tp_rank * width, width).copy_(part)
    else:
        here = layer.expert_map >= 0
        full[here] = part[layer.expert_map[here].long()]
    from vllm.distributed import get_tp_group

    group: Any = get_tp_group()
    return group.all_reduce(full.flatten(1, 2))


def _unpack_experts(layer: Any, attribute: str) -> torch.Tensor:
    """Return a parameter of all local experts as it was loaded [experts, rows, columns], maybe padded."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    method: Any = layer.quant_method
    # Quantized methods have no such attribute.
    backend = method.unquantized_backend
    weight: torch.Tensor = getattr(layer, attribute)
    if backend in (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON):
        return weight
    if backend != UnquantizedMoeBackend.CPU:
        raise AttributeError(f"vLLM keeps {attribute} in the layout of {backend}")
    experts: Any = method.moe_kernel.fused_experts
    if experts._use_zentorch:
        return weight
    positions = _packed_positions(experts.isa, *weight.shape[1:], weight.dtype)
    unpacked = torch.empty_like(weight)
    unpacked.flatten(1)[:, positions] = weight.flatten(1)
    return unpacked


@lru_cache
def _packed_positions(isa: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the position in a matrix of each value of its packed form, int64 [rows * columns].

    Positions are packed byte by byte, because each data type holds these exactly.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    positions = torch.arange(rows * columns)
    packed = torch.zeros_like(positions)
    for shift in (0, 8, 16, 24):
        byte = (positions >> shift & 255).to(dtype).view(1, rows, columns)
        packed |= cpu_prepack_moe_weight(byte, isa).flatten().long() << shift
    return packed


def _read_published(model: Any, name: str, shape: Sequence[int]) -> torch.Tensor:
    """Read a published tensor from the model's own layout; an `AttributeError` if it cannot be found."""
    mapped = _map_name(model, name)
    path, _, attribute = mapped.rpartition(".")
    parent, _, leaf = path.rpartition(".")
    published_leaf = name.rpartition(".")[0].rpartition(".")[2]
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    fused = next(
        (f for f, parts in packed.items() if published_leaf in parts and len(parts) > 1), None
    )
    if fused is not None and leaf in (fused, published_leaf):
        module = model.get_submodule(f"{parent}.{fused}")
        index = list(packed[fused]).index(published_leaf)
        sizes: list[int] = module.output_partition_sizes
        tensor = _read_parameter(module, attribute).narrow(0, sum(sizes[:index]), sizes[index])
    else:
        module = model.get_submodule(path)
        tensor = _read_parameter(module, attribute)
        if tensor.dim() and list(tensor.shape[1:]) == list(shape[1:]):
            # The vocabulary is padded.
            tensor = tensor[: shape[0]]
    tensor = gather_tensor(tensor, shape, module)
    if tensor.numel() != torch.Size(shape).numel():
        raise AttributeError(f"{mapped} has shape {tuple(tensor.shape)}; expected {shape}")
    return tensor


def _read_parameter(module: Any, name: str) -> torch.Tensor:
    """Return a parameter as the module's forward uses it; on CPU, where vLLM packs matrices, from its packed copy."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    parameter: torch.Tensor = getattr(module, name)
    if parameter.itemsize == 1:
        # Rounded, so it equals no published tensor.
        raise AttributeError(f"{name} is quantized to {parameter.dtype}")
    if not (isinstance(module, LinearBase | ParallelLMHead) and hasattr(module, "cpu_linear")):
        return parameter
    layer: Any = module
    if name != "weight":
        # Some kernels want it in float32, whatever it was loaded as.
        return parameter.to(layer.weight.dtype)
    if isinstance(module, ParallelLMHead):
        width: int = layer.embedding_dim
    else:
        # Replicated layers have no partitions.
        width = getattr(layer, "input_size_per_partition", layer.input_size)
    # The output for the rows of the identity is exactly the transposed matrix.
    identity = torch.eye(width, dtype=layer.weight.dtype)
    parts = [layer.quant_method.apply(layer, rows, None) for rows in identity.split(_ROWS_AT_ONCE)]
    return torch.cat(parts).t()


def _find_embedding(model: Any, shapes: Mapping[str, Sequence[int]]) -> str:
    """Return the published name of the tensor that shares its memory with a tied head; else an `AttributeError`."""
    head = _get_parameter(model, TIED_HEAD)
    for name in shapes:
        if name.endswith("embed_tokens.weight") and _get_parameter(model, name) is head:
            return name
    raise AttributeError(f"{TIED_HEAD} is no embedding")


def _get_parameter(model: Any, name: str) -> torch.Tensor:
    path, _, attribute = _map_name(model, name).rpartition(".")
    return getattr(model.get_submodule(path), attribute)


def _map_name(model: Any, name: str) -> str:
    """Return vLLM's name of a published tensor."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return name
    return mapper.map_name(name) or name
