"""Parameters read by slices: a model is made without memory, and each process reads the rows that it holds.

`from_pretrained` of transformers makes all of a model in one data type, on every rank. Here a parameter is in memory in
its last data type only, and on a rank of FSDP only its shard, which is read from the mapped file a few rows at a time.
"""

import json
import logging
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from gcore_trainer.lora import A_OF, initial_value, read_adapters
from gcore_trainer.lora_config import LoRAConfig
from gcore_trainer.torch.host_memory import first_row, local
from gcore_trainer.torch.loading import check_layers, choose_class, load_model

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_INITIALIZED = "_is_hf_initialized"
"""Attribute of tensors that transformers is not to initialize."""
_CHUNK_BYTES = 1 << 26
"""Most bytes of a file that are converted at a time, if that is not less than a row."""
_logger = logging.getLogger(__name__)


class _NotByNameError(Exception):
    """A folder whose tensors are not, each as it is, the parameters of its model."""


def make_model(
    model_class: Any, path: str | Path, *, attention: str, dtype: torch.dtype, device: torch.device
) -> tuple[Any, "SlicedWeights | None"]:
    """Make a folder's model without memory for its parameters, if its files have them by name; else load all of it.

    Args:
        kind: the class of packed model.
        attention: the ``attn_implementation``.
        dtype: data type of the model; parameters may be converted to another one before they are read.
        device: where parameters and buffers are to be.

    Returns:
        the model; and its parameters in the files, None: they were loaded.

    Raises:
        UnsupportedModelError, StateError: as of `load_model`.
    """
    auto_class, implementations, config = choose_class(model_class, path, attention)
    try:
        if dtype not in (torch.float32, torch.float64):
            raise _NotByNameError(f"dtype is {dtype}, of which transformers leaves out some parameters")
        if getattr(config, "quantization_config", None) is not None:
            raise _NotByNameError("it is quantized")
        folder = _Folder(Path(path))
        try:
            with torch.device("meta"):
                model = auto_class.from_config(config, dtype=dtype, attn_implementation=implementations)
            sources = _sources(model, folder.shapes)
        except (AttributeError, ImportError, KeyError, NotImplementedError, RuntimeError, TypeError) as error:
            raise _NotByNameError(f"transformers does not make it without memory ({error})") from error
        ignored: Sequence[str] = model._keys_to_ignore_on_load_unexpected or ()
        unexpected = folder.shapes.keys() - set(sources.values())
        check_layers(path, model, [n for n in unexpected if not any(re.search(pattern, n) for pattern in ignored)])
        tied = {id(p) for n, p in model.named_parameters(remove_duplicate=False) if n in sources}
        for name in sorted(n for n, p in model.named_parameters() if id(p) not in tied):
            # A new value head; one that the folder should have is the other loading's to refuse.
            if not name.startswith(model_class.new_weights) or type(model).__name__ in (config.architectures or ()):
                raise _NotByNameError(f"its files have no {name}")
        _make_buffers(model, folder, sources, device)
        if model.can_generate() and (Path(path) / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(path)
    except _NotByNameError as error:
        _logger.warning("%s is loaded whole by each process, in %s: %s", path, dtype, error)
        return load_model(model_class, path, attention=attention, dtype=dtype).to(device), None
    return model.eval(), SlicedWeights(folder, sources, dtype=dtype, device=device)


class SlicedWeights:
    """The parameters of one model in a folder's files.

    Args:
        sources: names of tensors in the files, by those of parameters.
        dtype: the model's data type, which it is checked in.
        device: where parameters are to be.
    """

    def __init__(
        self, folder: "_Folder", sources: Mapping[str, str], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._folder = folder
        self._sources = sources
        self._dtype = dtype
        self.device = device
        self.lora: LoRAConfig | None = None
        """Adapters of the model, if it has some."""

    @torch.no_grad()
    def fill(self, model: torch.nn.Module) -> None:
        """Give parameters on the meta device memory, and read them; of shards, this rank's rows.

        Those of adapters get what `add_lora` gives them, and a new value head is 0.
        """
        made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        named = dict(model.named_parameters(remove_duplicate=False))
        start = {} if self.lora is None else read_adapters(self.lora)
        with self._folder.opened() as read:
            for name, parameter in named.items():
                if parameter not in made:
                    made[parameter] = torch.nn.Parameter(_zeros(parameter, self.device), parameter.requires_grad)
                into = local(made[parameter])
                first = first_row(parameter)
                source = self._sources.get(name.replace(".base_layer.", "."))
                if source and name not in start:
                    read(source, into, first, self._dtype)
                elif name in start or name.endswith(A_OF):
                    value = initial_value(name, parameter.shape, start)
                    into.copy_(value[first : first + into.shape[0]])
        # FSDP looks for other parameters before its first pass; the same one under two names stays tied.
        model.load_state_dict({name: made[p] for name, p in named.items()}, strict=False, assign=True)

    @contextmanager
    def checking(self, packed: Any) -> Generator[None]:
        """Compute passes in the model's own data type, and on each rank all of a row.

        A layer's parameters are converted for its own pass, the others for the whole one, as FSDP gathers them.
        """
        layers: list[torch.nn.Module] = packed.layers()
        inner = {module for layer in layers for module in layer.modules()}
        outer = [module for module in packed.root.modules() if module not in inner]
        dtype = packed.compute_dtype
        packed.compute_dtype = self._dtype
        context = packed.context
        packed.context = None
        with ExitStack() as stack:
            stack.callback(setattr, packed, "compute_dtype", dtype)
            stack.callback(setattr, packed, "context", context)
            for part, modules in ((packed.root, outer), *((layer, list(layer.modules())) for layer in layers)):
                before, after = _conversion(modules, self._dtype)
                stack.callback(part.register_forward_pre_hook(before).remove)
                stack.callback(part.register_forward_hook(after, prepend=True, always_call=True).remove)
            try:
                yield
            finally:
                # A forward pass without a backward one leaves some parameters whole.
                if isinstance(packed.root, FSDPModule):
                    packed.root.reshard()


class _Folder:
    """The safetensors files of a Hugging Face folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if (path / _INDEX).is_file():
            self._file_of: dict[str, str] = json.loads((path / _INDEX).read_text())["weight_map"]
        elif (path / _SINGLE).is_file():
            with safe_open(path / _SINGLE, framework="pt") as file:
                self._file_of = dict.fromkeys(file.keys(), _SINGLE)
        else:
            raise _NotByNameError(f"there is neither {_SINGLE} nor {_INDEX}")
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name in sorted(set(self._file_of.values())):
            with safe_open(path / name, framework="pt") as file:
                self.shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a dict

    @contextmanager
    def opened(self) -> Generator[Callable[[str, torch.Tensor, int, torch.dtype], None]]:
        """Yield a function that copies the rows of a tensor, from a first one on, into another, by way of a dtype."""
        with ExitStack() as stack:
            opened = cache(lambda name: stack.enter_context(safe_open(self._path / name, framework="pt")))

            def read(name: str, into: torch.Tensor, first: int, dtype: torch.dtype) -> None:
                file = opened(self._file_of[name])
                if not into.ndim:
                    into.copy_(file.get_tensor(name).to(dtype))
                    return
                rows = file.get_slice(name)
                step = max(1, _CHUNK_BYTES // max(1, dtype.itemsize * into[:1].numel()))
                for start in range(0, into.shape[0], step):
                    part = into[start : start + step]
                    part.copy_(rows[first + start : first + start + part.shape[0]].to(dtype))

            yield read


def _sources(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the tensors of files by the names of parameters and saved buffers; of tied ones, by one name.

    Raises:
        _NotByNameError: some are to be converted, or two are given for one parameter.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

    transforms: list[Any] = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if not isinstance(t, WeightRenaming)]
    wanted: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    found: dict[str, str] = {}
    names: dict[int, str] = {}
    for key in sorted(shapes, key=dot_natural_key):
        name, converted = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and key in wanted:
            name, converted = rename_source_key(key, [], [], model.base_model_prefix, wanted)
        if name not in wanted:
            continue
        if converted is not None:
            raise _NotByNameError(f"{key} is converted on loading")
        if tuple(wanted[name].shape) != shapes[key]:
            raise _NotByNameError(f"{key} has shape {shapes[key]}, and {name} {tuple(wanted[name].shape)}")
        # transformers ties two tensors of one folder only if they are equal.
        if (other := names.setdefault(id(wanted[name]), key)) != key:
            raise _NotByNameError(f"{name} is both {other} and {key}")
        found[name] = key
    # What `save_pretrained` undoes.
    model._weight_conversions = [t for t in transforms if t.was_used()]
    return found


def _make_buffers(model: Any, folder: _Folder, sources: Mapping[str, str], device: torch.device) -> None:
    """Compute a model's buffers as transformers does on loading, on the CPU; those that are saved come from files."""
    for parameter in model.parameters():
        setattr(parameter, _INITIALIZED, True)
    with folder.opened() as read:
        for name, module in model.named_modules():
            for own, buffer in module._buffers.items():
                if buffer is None:
                    continue
                made = module._buffers[own] = torch.empty_like(buffer, device="cpu")
                if own in module._non_persistent_buffers_set:
                    continue
                full = f"{name}.{own}" if name else own
                if full not in sources:
                    raise _NotByNameError(f"its files have no {full}")
                read(sources[full], made, 0, made.dtype)
                setattr(made, _INITIALIZED, True)
    model.initialize_weights()
    for name, module in model.named_modules():
        for own, buffer in module._buffers.items():
            module._buffers[own] = None if buffer is None else buffer.to(device)
        for own, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise _NotByNameError(f"{name}.{own} is a tensor and no buffer")


def _zeros(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    own = torch.zeros(local(parameter).shape, dtype=parameter.dtype, device=device)
    if not isinstance(parameter, DTensor):
        return own
    mesh = parameter.device_mesh
    placements = parameter.placements
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def _conversion(modules: list[Any], dtype: torch.dtype) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return hooks for before and after a pass, during which modules have their parameters in another data type."""
    kept: list[tuple[Any, str, torch.nn.Parameter]] = []

    def before(*call: Any) -> None:
        del call
        wide: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.dtype == dtype:
                    continue
                if parameter not in wide:
                    wide[parameter] = torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                kept.append((module, name, parameter))
                module._parameters[name] = wide[parameter]

    def after(*call: Any) -> None:
        del call
        for module, name, parameter in kept:
            module._parameters[name] = parameter
        kept.clear()

    return before, after
