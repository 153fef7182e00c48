"""Low-rank adapters instead of full fine-tuning: W + (alpha / rank) B A; B and A learn (arXiv 2106.09685)."""

import copy
import hashlib
import json
import logging
import math
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gcore_trainer.errors import ConfigError, make_extra_error
from gcore_trainer.lora_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX, LoRAConfig

TRAINED = "default"
"""Name of the adapters that are trained."""
A_OF = f".lora_A.{TRAINED}.weight"
B_OF = f".lora_B.{TRAINED}.weight"
"""Suffixes of peft to a layer's name, for its A [rank, in] and its B [out, rank]."""
_BASE = ".base_layer."
_ADAPTER = re.compile(r"(?P<layer>.*\.lora_[AB])\.(?P<set>\w+)\.weight")
_PLAIN_ADAPTER = re.compile(r"(.*\.lora_[AB])\.weight")

TensorT = TypeVar("TensorT", bound=torch.Tensor)


def add_lora(model: Any, config: LoRAConfig, *, head: tuple[str, ...] = ()) -> None:
    """Add adapters to the linear layers of a model of transformers or diffusers, by peft, and freeze all else.

    Initial values are those of `initial_value`.

    Args:
        head: beginnings of the names of a new head's tensors, which are trained whole.

    Raises:
        ConfigError: the model has no such layers, they are not linear ones, or the adapters in ``config.path`` are of
            another model.
        TrainerError: peft is not installed.
    """
    # peft imports bitsandbytes, which logs that a package of kernels for 4-bit weights is missing.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.CRITICAL)
    try:
        import peft
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        raise make_extra_error("peft", "lora") from None
    names = config.target_modules
    targets = list(names)
    output = None
    if hasattr(model, "get_output_embeddings"):
        output = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is output:
            _refuse_head(config, name)
    if names == ("all-linear",):
        # What peft makes of the word reaches for fused experts and routers, too.
        targets = []
        for name, module in model.named_modules():
            is_head = module is output or f"{name}.".startswith(head)
            if isinstance(module, torch.nn.Linear) and not is_head:
                targets.append(name)
    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=targets, use_rslora=config.use_rslora
    )
    is_meta = next(model.parameters()).is_meta
    # It draws each A, from the generator that others draw from.
    with torch.random.fork_rng():
        try:
            peft.inject_adapter_in_model(settings, model, low_cpu_mem_usage=is_meta)
        except ValueError as error:
            raise ConfigError(f"target_modules is {names}: {error}") from None
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and not isinstance(
            module.get_base_layer(), torch.nn.Linear
        ):
            raise ConfigError(
                f"target_modules is {names}; expected linear layers, which alone can be merged: {name} is none"
            )
    for name, parameter in model.named_parameters():
        if name.startswith(head):
            parameter.requires_grad_()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    start = read_adapters(config)
    if config.path:
        check_start(start, {name: tuple(p.shape) for name, p in trained.items()}, config)
    with torch.no_grad():
        for name, parameter in trained.items():
            if not is_meta and (start or name.endswith(A_OF)):
                parameter.copy_(initial_value(name, parameter.shape, start))


def _refuse_head(config: LoRAConfig, head: str) -> None:
    """Raise `ConfigError` for an adapter of the output layer: packed training computes with its weight alone."""
    for target in config.target_modules:
        if head == target or head.endswith(f".{target}"):
            raise ConfigError(
                f"target_modules is {config.target_modules}; expected layers other than the head {head!r}, which is "
                "computed without one: leave it out, or merge the adapters of a folder that has one into its model"
            )


def read_adapters(config: LoRAConfig) -> dict[str, torch.Tensor]:
    """Return the adapters that training starts from, by the names of parameters; an empty dict if they are new."""
    if not config.path:
        return {}
    file = Path(config.path) / ADAPTER_WEIGHTS
    try:
        if file.is_file():
            tensors = load_file(file)
        else:
            from gcore_trainer.diffusion.lora_file import read_lora_file

            _, tensors = read_lora_file(config.path)
    except SafetensorError as error:
        raise ConfigError(
            f"path is {config.path!r}; expected adapters that load: {file.name}: {error}"
        ) from None
    adapters: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        full_name = _PLAIN_ADAPTER.sub(rf"\1.{TRAINED}.weight", name.removeprefix(PREFIX))
        adapters[full_name] = tensor
    return adapters


def check_start(
    start: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], config: LoRAConfig
) -> None:
    """Raise `ConfigError` unless the adapters in a folder fit a model in layers and sizes.

    Args:
        shapes: of the model's adapters, by name; a shape of () is not compared.
    """
    where = f"path is {config.path!r}; expected adapters of this model"
    extra = sorted(start.keys() - shapes.keys())
    if extra:
        raise ConfigError(
            f"{where}, which has no layer for {len(extra)} of its tensors, such as {extra[0]}"
        )
    missing = sorted(shapes.keys() - start.keys())
    if missing:
        raise ConfigError(
            f"{where}, for {len(missing)} of whose tensors there is none, such as {missing[0]}"
        )
    for name, shape in shapes.items():
        if shape and tuple(start[name].shape) != shape:
            raise ConfigError(
                f"{where}, where {name} has shape {shape}, and not {tuple(start[name].shape)}"
            )


def initial_value(
    name: str, shape: Sequence[int], start: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return the initial value of an adapter's full tensor, in float32: from ``start`` unless that is empty.

    A new adapter has A of `initial_a` and B = 0, so that the model's output is unchanged.
    """
    if start:
        return start[name].float()
    if name.endswith(A_OF):
        return initial_a(name.removesuffix(A_OF), *shape)
    return torch.zeros(tuple(shape))


def save_adapters(
    folder: Path,
    adapters: Mapping[str, torch.Tensor],
    config: LoRAConfig,
    *,
    base: str,
    modules: Iterable[str] = (),
    has_value_head: bool = False,
) -> None:
    """Write adapters in the format that ``peft.PeftModel.from_pretrained`` loads onto their base model.

    Args:
        adapters: whole tensors, by the names of the parameters of transformers' model.
        base: that model, as peft finds it: a folder, or a name on the Hub.
        modules: names of the model's modules, among which the last parts of the adapted ones' may not be enough.
        has_value_head: they are of a sequence classifier, whose head is among the tensors.
    """
    names = list(config.target_modules)
    if config.target_modules == ("all-linear",):
        layers = {name.partition(".lora_")[0] for name in adapters if ".lora_" in name}
        lasts = {layer.rpartition(".")[2] for layer in layers}
        other_lasts = {name.rpartition(".")[2] for name in modules if name not in layers}
        names = sorted(layers if lasts & other_lasts else lasts)
    settings = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if has_value_head else "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base).absolute()) if Path(base).is_dir() else base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": names,
        "use_rslora": config.use_rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "modules_to_save": ["classifier", "score"] if has_value_head else None,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        PREFIX + n.replace(f".{TRAINED}.", "."): t.cpu().contiguous() for n, t in adapters.items()
    }
    save_file(tensors, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")


class AdapterSets:
    """Sets of adapters on one model's frozen weights, of which each pass uses one, or none.

    Args:
        model: what `add_lora` has added adapters to; those are the set ``default``.
    """

    def __init__(self, model: Any) -> None:
        from peft.tuners.lora import LoraLayer

        self._layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        # Threads may ask for scores of several sets at once.
        self._lock = threading.RLock()

    def copy(self, name: str) -> None:
        """Add a set that equals the trained one, and is not trained."""
        for layer in self._layers:
            for parts in (layer.lora_A, layer.lora_B, layer.lora_dropout):
                parts[name] = copy.deepcopy(parts[TRAINED]).requires_grad_(False)
            layer.scaling[name] = layer.scaling[TRAINED]

    @contextmanager
    def use(self, name: str | None) -> Generator[None]:
        """Compute with one set inside the block, or with the frozen weights alone; afterwards with the trained one."""
        with self._lock:
            self._activate(name)
            try:
                yield
            finally:
                # Checkpointed activations are computed again outside the block.
                self._activate(TRAINED)

    def _activate(self, name: str | None) -> None:
        for layer in self._layers:
            # Its public setter would change which parameters are trained.
            layer._active_adapter = [] if name is None else [name]  # pyright: ignore[reportPrivateUsage]


def adapters_named(parameters: Mapping[str, TensorT], name: str | None) -> dict[str, TensorT]:
    """Return a model's parameters with one set of its adapters alone, or none, under the names of the trained set."""
    selected: dict[str, TensorT] = {}
    for full_name, parameter in parameters.items():
        adapter = _ADAPTER.fullmatch(full_name)
        if adapter is None or adapter["set"] == name:
            selected[trained_name(full_name)] = parameter
    return selected


def trained_name(name: str) -> str:
    """Return the name of an adapter's counterpart in the trained set; names of other parameters stay as they are."""
    return _ADAPTER.sub(rf"\g<layer>.{TRAINED}.weight", name)


def initial_a(layer: str, rank: int, in_features: int, *, seed: int = 0) -> torch.Tensor:
    """Draw A [rank, in_features] in float32: the same in every backend, layout and order.

    Kaiming's uniform distribution as of torch's own linear layers, whose bounds are the root of 1 / in_features.
    """
    digest = hashlib.sha256(f"{seed} {layer}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
    a = torch.empty(rank, in_features, dtype=torch.float32)
    return torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)


@dataclass(frozen=True)
class LoRAWeights:
    """A model's frozen weights and its adapters; iterating yields names and merged weights, one at a time.

    Each is gathered from all ranks when it is called, or iterated over: all ranks make the same calls.

    Example:
        >>> base = torch.zeros(2, 2)
        >>> adapters = {"layer.lora_A.weight": torch.ones(1, 2), "layer.lora_B.weight": torch.ones(2, 1)}
        >>> weights = LoRAWeights(
        ...     parameters=lambda: [("layer.weight", base)],
        ...     adapters=lambda: adapters,
        ...     config=LoRAConfig(rank=1, alpha=1),
        ... )
        >>> dict(weights)
        {'layer.weight': tensor([[0., 0.],
                [0., 0.]])}
    """

    parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    """Names and full tensors of the model, with or without its adapters."""
    adapters: Callable[[], Mapping[str, torch.Tensor]]
    """Names and full tensors of the adapters."""
    config: LoRAConfig

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return merge_lora(self.parameters(), self.adapters(), self.config)

    def frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the frozen weights, under the names of merged ones."""
        return merge_lora(self.parameters(), {}, self.config)


def merge_lora(
    parameters: Iterable[tuple[str, torch.Tensor]],
    adapters: Mapping[str, torch.Tensor],
    config: LoRAConfig,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Hugging Face names and weights with the adapters merged into them, one at a time.

    The arithmetic is in float32 at least, and is rounded to the data type of the weights once, at the end.

    Args:
        parameters: names and whole tensors of a model; its adapters, if they are among them, are left out.
        adapters: names and whole tensors of the adapters; all are used.
        config: what they were made with.
    """
    for name, tensor in parameters:
        if name.endswith((A_OF, B_OF)):
            continue
        plain = name.replace(_BASE, ".")
        layer, _, parameter_name = plain.rpartition(".")
        if parameter_name == "weight" and layer + A_OF in adapters:
            wide = torch.promote_types(tensor.dtype, torch.float32)
            a = adapters[layer + A_OF].to(tensor.device, wide)
            b = adapters[layer + B_OF].to(tensor.device, wide)
            yield plain, (tensor.to(wide) + config.scaling * (b @ a)).to(tensor.dtype)
        else:
            yield plain, tensor
