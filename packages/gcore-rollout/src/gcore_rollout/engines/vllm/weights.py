"""The weights of a vLLM model as the published tensors: unfused, unpadded and unpacked."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from gcore_rollout.engines.protocol import HeldTensor
from gcore_rollout.engines.vllm.process import TIED_HEAD
from gcore_rollout.weight_sync.checked import held

_ROWS_AT_ONCE = 1024


@torch.no_grad()
def held_tensors(
    model: Any, *, shapes: Mapping[str, tuple[int, ...]], is_tied: bool, names: Sequence[str] | None
) -> list[HeldTensor]:
    """Digest the weights of a model on one device, but for experts and others that vLLM keeps in layouts of its own.

    Args:
        shapes: of the published tensors, by Hugging Face name.
        is_tied: whether the head is the embedding, which is then reported as a tensor of its own.
        names: the tensors; None: all that can be read.
    """
    found: list[HeldTensor] = []
    for name in {**shapes, **({TIED_HEAD: ()} if is_tied else {})} if names is None else names:
        source = _embedding(model, shapes) if is_tied and name == TIED_HEAD else name
        if source is None:
            continue
        try:
            found.append(held(name, partial(_read, model, name, shapes[source]), source=source))
        except AttributeError:
            # There is no module or parameter of this name: vLLM has made something else of it.
            continue
    return found


def _read(model: Any, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Read a published tensor from the model's own layout; an `AttributeError` if it cannot be found."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    mapped: str = (mapper.map_name(name) if mapper is not None else name) or name
    path, _, kind = mapped.rpartition(".")
    parent, _, leaf = path.rpartition(".")
    published_leaf = name.rpartition(".")[0].rpartition(".")[2]
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    fused = next((f for f, parts in packed.items() if published_leaf in parts and len(parts) > 1), None)
    if fused is not None and leaf in (fused, published_leaf):
        module = model.get_submodule(f"{parent}.{fused}")
        place = list(packed[fused]).index(published_leaf)
        sizes: list[int] = module.output_sizes
        tensor = _parameter(module, kind).narrow(0, sum(sizes[:place]), sizes[place])
    else:
        tensor = _parameter(model.get_submodule(path), kind)
        if tensor.dim() and tensor.shape[1:] == shape[1:]:
            # The vocabulary is padded.
            tensor = tensor[: shape[0]]
    if tensor.numel() != torch.Size(shape).numel():
        raise AttributeError(f"{mapped} has shape {tuple(tensor.shape)}; expected {shape}")
    return tensor


def _parameter(module: Any, kind: str) -> torch.Tensor:
    """Return a parameter as the module's forward uses it; on CPU, where vLLM packs matrices, from its packed copy."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    parameter: torch.Tensor = getattr(module, kind)
    if not (isinstance(module, LinearBase | ParallelLMHead) and hasattr(module, "cpu_linear")):
        return parameter
    own: Any = module
    if kind != "weight":
        # Some kernels want it in float32, whatever it was loaded as.
        return parameter.to(own.weight.dtype)
    width: int = own.embedding_dim if isinstance(module, ParallelLMHead) else own.input_size
    # The output for the rows of the identity is exactly the transposed matrix.
    identity = torch.eye(width, dtype=own.weight.dtype)
    parts = [own.quant_method.apply(own, rows, None) for rows in identity.split(_ROWS_AT_ONCE)]
    return torch.cat(parts).t()


def _embedding(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return the published name of the tensor that shares its memory with a tied head."""
    try:
        head = _plain(model, TIED_HEAD)
        return next((n for n in shapes if n.endswith("embed_tokens.weight") and _plain(model, n) is head), None)
    except AttributeError:
        return None


def _plain(model: Any, name: str) -> torch.Tensor:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    path, _, kind = ((mapper.map_name(name) if mapper is not None else name) or name).rpartition(".")
    return getattr(model.get_submodule(path), kind)
