"""The model of a diffusers pipeline, called with the conditions under which images were made."""

import copy
import inspect
import json
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from gcore_trainer.adamw import gather_full_tensor
from gcore_trainer.diffusion.conditions import Conditioned, with_appended
from gcore_trainer.errors import MissingExtraError, UnsupportedModelError
from gcore_trainer.lora import TRAINED, AdapterSets, LoRAWeights, adapters_named, add_lora
from gcore_trainer.lora_config import LoRAConfig
from gcore_trainer.torch.activations import is_checkpointed
from gcore_trainer.torch.compiled import compile_backend
from gcore_trainer.torch.host_memory import Sleeper
from gcore_trainer.torch.parallel import shard_modules

try:
    import diffusers
except ImportError:
    raise MissingExtraError("diffusers", "diffusion") from None

_COMPONENTS = ("transformer", "transformer_2", "unet")
_MOST_GRAPHS = 64
"""Graphs of a block's code; of more, torch.compile gives up without an error."""


class Denoiser:
    """A transformer or UNet of diffusers that gives velocities or noise.

    Args:
        compute_dtype: of its passes; its parameters stay in float32.
        lora: adapters to be trained in its place.
        gradient_checkpointing: whether activations are computed again in the backward pass; auto: for models of a
            billion parameters or more on CUDA.
    """

    def __init__(
        self,
        model: Any,
        *,
        compute_dtype: torch.dtype = torch.float32,
        lora: LoRAConfig | None = None,
        gradient_checkpointing: bool | Literal["auto"] = False,
    ) -> None:
        self.model = model
        self.lora = lora
        self._compute_dtype = compute_dtype
        self.device: torch.device = next(model.parameters()).device
        parameters = inspect.signature(model.forward).parameters
        self._latents, *others = parameters
        self._timesteps = next((name for name in ("timesteps", "t") if name in others), "timestep")
        # Z-Image's model takes and gives a list of images, each [C, frames, H, W].
        self._is_of_lists = str(parameters[self._latents].annotation).startswith("list")
        if is_checkpointed(gradient_checkpointing, model, self.device):
            model.enable_gradient_checkpointing()
        self._adapters = self._adapter = None
        if lora is not None:
            add_lora(model, lora)
            self._adapters = AdapterSets(model)
            self._adapter = TRAINED
        # Dropout would make every ratio to the sampling policy noise.
        model.eval()
        self._sleeper = Sleeper(model)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        component: str = "",
        variant: str | None = None,
        device: str = "cpu",
        **options: Any,
    ) -> Self:
        """Load the model of a pipeline's folder, in float32; errors are those of `pipeline_component`.

        Args:
            component: name of the model, if the pipeline has two.
            variant: of the weights, as in ``diffusion_pytorch_model.fp16.safetensors``.
        """
        name, kind = pipeline_component(path, component)
        load = getattr(diffusers, kind).from_pretrained
        model = load(Path(path) / name, dtype=torch.float32, variant=variant, local_files_only=True)
        return cls(model.to(device), **options)

    def __call__(self, latents: torch.Tensor, timesteps: torch.Tensor, conditions: Conditioned) -> torch.Tensor:
        """Return what a pipeline's scheduler was given for latents [B, ...] and timesteps [B], [B, ...] in float32."""
        if conditions.guidance_scale is not None:
            latents = torch.cat([latents, latents])
            timesteps = torch.cat([timesteps, timesteps])
        if len(conditions.calls) == 1:
            [(_, arguments)] = conditions.calls
            return conditions.combined(self._called(latents, timesteps, arguments))
        places = [place for rows, _ in conditions.calls for place in rows]
        outputs = [self._called(latents[rows], timesteps[rows], given) for rows, given in conditions.calls]
        return conditions.combined(torch.cat(outputs)[np.argsort(places)])

    def _called(self, latents: torch.Tensor, timesteps: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        dtype = self._compute_dtype
        given, others = with_appended(latents, arguments)
        if self._is_of_lists:
            given = [each.unsqueeze(1) for each in given]
        arguments = {self._latents: given, self._timesteps: timesteps, **others}
        adapters = nullcontext() if self._adapters is None else self._adapters.use(self._adapter)
        with adapters, torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
            output = self.model(**arguments, return_dict=False)[0]
        if self._is_of_lists:
            output = torch.stack(output).squeeze(2)
        # A learned variance may follow the latents' channels, and outputs for what was appended to them.
        return output[tuple(map(slice, latents.shape))].float()

    def initial(self) -> "Denoiser":
        """Return the initial policy: the model without its adapters, or with a copy of those that it starts from.

        Without adapters, see `copied`.
        """
        if self.lora is None:
            return self.copied()
        return self.copied("initial") if self.lora.path else self._with_adapter(None)

    def copied(self, name: str = "old") -> "Denoiser":
        """Return another one with the same weights, of which none is trained; the frozen ones are shared.

        ``name`` is that of its adapters, if there are any.
        """
        if self._adapters is not None:
            self._adapters.copy(name)
            return self._with_adapter(name)
        twin = copy.copy(self)
        twin.model = copy.deepcopy(self.model).requires_grad_(False)
        twin._sleeper = Sleeper(twin.model)
        return twin

    def _with_adapter(self, name: str | None) -> "Denoiser":
        twin = copy.copy(self)
        twin._adapter = name
        return twin

    def sleep(self) -> None:
        """Free the device's memory of the parameters until `wake`."""
        self._sleeper.sleep()

    def wake(self) -> None:
        """Undo `sleep`, if this model is asleep."""
        self._sleeper.wake()

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard the parameters in place, block by block (FSDP2, ZeRO-3: arXiv 1910.02054)."""
        dtype = None if self._compute_dtype == torch.float32 else self._compute_dtype
        shard_modules([*self._blocks, self.model], mesh, dtype=dtype)

    def compile(self, *, backend: str | None = None) -> None:
        """Compile the blocks, which the first passes do; results change by rounding errors.

        Copies and shards are made before: they would call the blocks of this model.

        Args:
            backend: of torch.compile; None: Inductor, or on a CPU without a C++ compiler one that makes nothing faster.
        """
        # One graph for each kind of block, with and without gradient, for each set of adapters.
        dynamo: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage]
        dynamo.recompile_limit = max(dynamo.recompile_limit, _MOST_GRAPHS)
        backend = backend or compile_backend(self.device)
        for block in self._blocks:
            block.forward = torch.compile(block.forward, dynamic=True, backend=backend)

    @property
    def _blocks(self) -> list[torch.nn.Module]:
        return [*chain(*(part for part in self.model.children() if isinstance(part, torch.nn.ModuleList)))]

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return parameters by diffusers' names, adapters by peft's; of a sharded model this rank's shards."""
        for module in self.model.modules():
            # A forward pass without a backward one leaves some whole.
            if isinstance(module, FSDPModule):
                module.reshard()
        return adapters_named(dict(self.model.named_parameters()), self._adapter)

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return those of `parameters` that are trained."""
        return {name: p for name, p in self.parameters().items() if p.requires_grad}

    def weights(self, trained: dict[str, torch.Tensor] | None = None) -> Iterable[tuple[str, torch.Tensor]]:
        """Return diffusers' names and whole tensors, on every rank; ``trained`` replaces the model's own.

        See `Trainer.export_weights`.
        """
        own: dict[str, torch.Tensor] = trained or {n: p.detach() for n, p in self.trained_parameters().items()}

        def named() -> Iterator[tuple[str, torch.Tensor]]:
            return ((n, gather_full_tensor(own[n] if n in own else p.detach())) for n, p in self.parameters().items())

        if self.lora is not None:
            return LoRAWeights(
                named, lambda: {name: gather_full_tensor(tensor) for name, tensor in own.items()}, self.lora
            )
        return named()


def pipeline_component(path: str | Path, component: str = "") -> tuple[str, str]:
    """Return name and class of the model in a pipeline's folder, of this name if the pipeline has two.

    Raises:
        UnsupportedModelError: the folder is no pipeline's, or it has no such model.
    """
    index = Path(path) / "model_index.json"
    if not index.is_file():
        raise UnsupportedModelError(f"{path} has no model_index.json; expected a pipeline's folder of diffusers")
    components = json.loads(index.read_text())
    names = [component] if component else _COMPONENTS
    for name in names:
        if components.get(name) and components[name][1]:
            return name, components[name][1]
    raise UnsupportedModelError(f"{index} names none of {', '.join(names)}; expected a pipeline with one")
