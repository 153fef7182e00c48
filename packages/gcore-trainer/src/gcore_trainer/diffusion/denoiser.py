"""The model of a diffusers pipeline, called with the conditions under which images were made."""

import copy
import inspect
import json
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from gcore_trainer.diffusion.conditions import Conditioned, with_appended
from gcore_trainer.errors import UnsupportedModelError, make_extra_error
from gcore_trainer.lora import TRAINED, AdapterSets, LoRAWeights, adapters_named, add_lora
from gcore_trainer.lora_config import LoRAConfig
from gcore_trainer.torch.activations import is_checkpointed
from gcore_trainer.torch.compiled import compile_backend
from gcore_trainer.torch.host_memory import Sleeper
from gcore_trainer.torch.optimizer import gather_full_tensor
from gcore_trainer.torch.parallel import shard_modules
from gcore_trainer.torch.sliced_weights import SlicedWeights, make_by_name

try:
    import diffusers
    from diffusers.models.modeling_utils import no_init_weights
    from diffusers.utils.constants import SAFETENSORS_WEIGHTS_NAME
except ImportError:
    raise make_extra_error("diffusers", "diffusion") from None

_COMPONENTS = ("transformer", "transformer_2", "unet")
_CONVERTED = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
"""Modules whose parameters autocast converts in each pass."""
_MOST_GRAPHS = 64
"""Graphs of a block's code; of more, torch.compile gives up without an error."""


class Denoiser:
    """A transformer or UNet of diffusers that gives velocities or noise.

    Args:
        compute_dtype: dtype of passes, and of the weights of linear layers and convolutions that are frozen; all other
            parameters stay in float32.
        lora: adapters to train in place of the parameters.
        gradient_checkpointing: whether activations are computed again in the backward pass; auto: for models of a
            billion parameters or more on CUDA.
        weights: the parameters of a model without memory; `load_weights` reads them.

    Example:
        >>> from diffusers import SD3Transformer2DModel
        >>> model = SD3Transformer2DModel(
        ...     sample_size=8, num_layers=1, num_attention_heads=1, attention_head_dim=8, joint_attention_dim=8,
        ...     caption_projection_dim=8, pooled_projection_dim=8, in_channels=4, out_channels=4, pos_embed_max_size=8
        ... )
        >>> denoiser = Denoiser(model, lora=LoRAConfig(rank=2, alpha=4))
        >>> sum(parameter.numel() for parameter in denoiser.trained_parameters().values()) > 0
        True
    """

    def __init__(
        self,
        model: Any,
        *,
        compute_dtype: torch.dtype = torch.float32,
        lora: LoRAConfig | None = None,
        gradient_checkpointing: bool | Literal["auto"] = False,
        weights: SlicedWeights | None = None,
    ) -> None:
        self.model = model
        self.lora = lora
        self._compute_dtype = compute_dtype
        self._weights = weights
        self.device: torch.device = next(model.parameters()).device
        if weights is not None:
            self.device = weights.device
            weights.lora = lora
        parameters = inspect.signature(model.forward).parameters
        self._latents = next(iter(parameters))
        self._timesteps = next(
            (name for name in ("timesteps", "t") if name in parameters), "timestep"
        )
        # Z-Image's model takes and gives a list of images, each [C, frames, H, W].
        self._is_of_lists = str(parameters[self._latents].annotation).startswith("list")
        if is_checkpointed(gradient_checkpointing, model, self.device):
            model.enable_gradient_checkpointing()
        self._adapters: AdapterSets | None = None
        self._adapter: str | None = None
        if lora is not None:
            add_lora(model, lora)
            self._adapters = AdapterSets(model)
            self._adapter = TRAINED
        self._convert_frozen()
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
        sharded: bool = False,
        **options: Any,
    ) -> Self:
        """Load the model of a pipeline's folder; errors are those of `pipeline_component`.

        Args:
            component: name of the model, if the pipeline has two.
            variant: of the weights, as in ``diffusion_pytorch_model.fp16.safetensors``.
            sharded: whether its parameters are read by a `DiffusionTrainer`, on each rank its own rows of them.
        """
        name, class_name = pipeline_component(path, component)
        folder = Path(path) / name
        model_class = getattr(diffusers, class_name)

        def make() -> Any:
            with no_init_weights():
                model = model_class.from_config(model_class.load_config(folder))
            model.register_to_config(_name_or_path=folder)
            return model

        stem, ending = SAFETENSORS_WEIGHTS_NAME.split(".")
        file = ".".join(filter(None, (stem, variant, ending)))
        model, weights = make_by_name(make, folder, file, device=torch.device(device))
        if weights is None:
            load = model_class.from_pretrained
            model = load(folder, dtype=torch.float32, variant=variant, local_files_only=True)
            model.to(device)
        denoiser = cls(model, weights=weights, **options)
        if not sharded:
            denoiser.load_weights()
        return denoiser

    def load_weights(self) -> None:
        """Read the parameters of a model without memory, of a sharded one this rank's rows."""
        if self._weights is not None:
            self._weights.fill(self.model)
            self._weights = None

    def __call__(
        self, latents: torch.Tensor, timesteps: torch.Tensor, conditions: Conditioned
    ) -> torch.Tensor:
        """Predict the scheduler's input [B, ...] in float32 from latents [B, ...] and timesteps [B]."""
        if conditions.guidance_scale is not None:
            latents = torch.cat([latents, latents])
            timesteps = torch.cat([timesteps, timesteps])
        if len(conditions.calls) == 1:
            [(_, arguments)] = conditions.calls
            return conditions.combine(self._call_model(latents, timesteps, arguments))
        order: list[int] = []
        outputs: list[torch.Tensor] = []
        for rows, arguments in conditions.calls:
            order.extend(rows)
            outputs.append(self._call_model(latents[rows], timesteps[rows], arguments))
        return conditions.combine(torch.cat(outputs)[np.argsort(order)])

    def _call_model(
        self, latents: torch.Tensor, timesteps: torch.Tensor, arguments: dict[str, Any]
    ) -> torch.Tensor:
        dtype = self._compute_dtype
        inputs, options = with_appended(latents, arguments)
        if self._is_of_lists:
            inputs = [image.unsqueeze(1) for image in inputs]
        arguments = {self._latents: inputs, self._timesteps: timesteps, **options}
        adapters = nullcontext() if self._adapters is None else self._adapters.use(self._adapter)
        with (
            adapters,
            torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32),
        ):
            output = self.model(**arguments, return_dict=False)[0]
        if self._is_of_lists:
            output = torch.stack(output).squeeze(2)
        # A learned variance may follow the latents' channels, and outputs for what was appended to them.
        return output[tuple(map(slice, latents.shape))].float()

    def initial(self) -> "Denoiser":
        """Return the initial policy: the model without adapters, or with a copy of the adapters that it starts from.

        Without adapters, it is a copy whose frozen weights are in the data type of passes.
        """
        if self.lora is None:
            twin = self.copy()
            twin._convert_frozen()
            return twin
        if self.lora.path:
            return self.copy("initial")
        return self._with_adapter(None)

    def copy(self, name: str = "old") -> "Denoiser":
        """Return a copy whose weights are not trained; frozen weights are shared.

        ``name`` names the copy's adapters, if there are any.
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
        twin._weights = None
        return twin

    def _convert_frozen(self) -> None:
        """Convert the frozen parameters of which autocast would make a copy in each pass."""
        if self._compute_dtype == torch.float32:
            return
        for module in self.model.modules():
            if isinstance(module, _CONVERTED):
                for parameter in module.parameters(recurse=False):
                    if not parameter.requires_grad:
                        parameter.data = parameter.data.to(self._compute_dtype)

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
        """Compile the blocks in the first passes; results change by rounding errors.

        Copy and shard the model before: a copy made later would call the blocks of this model.

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
    def num_gathered(self) -> int:
        """Most parameters that a rank of a sharded model has whole: those of two blocks, and all outside of blocks."""
        sizes = [sum(p.numel() for p in block.parameters()) for block in self._blocks]
        total = sum(p.numel() for p in self.model.parameters())
        return total - sum(sizes) + sum(sorted(sizes)[-2:])

    @property
    def _blocks(self) -> list[torch.nn.Module]:
        blocks: list[torch.nn.Module] = []
        for part in self.model.children():
            if isinstance(part, torch.nn.ModuleList):
                blocks.extend(part)
        return blocks

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return parameters by diffusers' names, adapters by peft's; of a sharded model this rank's shards."""
        for module in self.model.modules():
            # A forward pass without a backward one leaves some parameters gathered.
            if isinstance(module, FSDPModule):
                module.reshard()
        return adapters_named(dict(self.model.named_parameters()), self._adapter)

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained ones of `parameters`."""
        return {name: p for name, p in self.parameters().items() if p.requires_grad}

    def weights(
        self, trained: dict[str, torch.Tensor] | None = None
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Return diffusers' names and full tensors, on every rank; ``trained`` replaces the model's own.

        See `Trainer.export_weights`.
        """
        replaced: dict[str, torch.Tensor] = trained or {
            n: p.detach() for n, p in self.trained_parameters().items()
        }

        def gather_parameters() -> Iterator[tuple[str, torch.Tensor]]:
            for name, parameter in self.parameters().items():
                yield name, gather_full_tensor(replaced.get(name, parameter.detach()))

        def gather_adapters() -> dict[str, torch.Tensor]:
            return {name: gather_full_tensor(tensor) for name, tensor in replaced.items()}

        if self.lora is not None:
            return LoRAWeights(gather_parameters, gather_adapters, self.lora)
        return gather_parameters()


def pipeline_component(path: str | Path, component: str = "") -> tuple[str, str]:
    """Return the name and class of the model in a pipeline's folder; ``component`` chooses among two.

    Raises:
        UnsupportedModelError: the folder is no pipeline's, or it has no such model.
    """
    index = Path(path) / "model_index.json"
    if not index.is_file():
        raise UnsupportedModelError(
            f"{path} has no model_index.json; expected a pipeline's folder of diffusers"
        )
    components = json.loads(index.read_text())
    names = [component] if component else _COMPONENTS
    for name in names:
        if components.get(name) and components[name][1]:
            return name, components[name][1]
    raise UnsupportedModelError(
        f"{index} names none of {', '.join(names)}; expected a pipeline with one"
    )
