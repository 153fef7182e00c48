"""Reading of parameters by slices: a model is made on the meta device, and each process reads the rows of its shard.

`from_pretrained` of transformers makes all of a model in one data type, on every rank. Here a parameter is in memory in
its last data type only, and on a rank of FSDP only its shard, which is read from the mapped file a few rows at a time.
"""

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

from gcore_trainer.lora import A_OF, initial_value, read_adapters, trained_name
from gcore_trainer.lora_config import LoRAConfig
from gcore_trainer.torch.host_memory import first_row, local
from gcore_trainer.torch.loading import check_layers, choose_class, load_model
from gcore_trainer.torch.streamed_folder import SINGLE_FILE, tensor_files

_INITIALIZED = "_is_hf_initialized"
"""Attribute of tensors that transformers is not to initialize."""
_CHUNK_BYTES = 1 << 26
"""Most bytes of a file that are converted at a time, if that is not less than a row."""
_logger = logging.getLogger(__name__)


_Source = str | Sequence[Sequence[str]]
"""The tensor of the files that a parameter is; of fused experts [E, rows, columns], the tensors of each expert, whose
rows follow each other."""


class _NotByNameError(Exception):
    """A folder's tensors are neither the parameters of its model nor the experts that these consist of."""


def make_model(
    model_class: Any, path: str | Path, *, attention: str, dtype: torch.dtype, device: torch.device
) -> tuple[Any, "SlicedWeights | None"]:
    """Make a folder's model on the meta device if its files have the parameters by name; else load all of it.

    Args:
        model_class: the class of packed model.
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
            raise _NotByNameError(
                f"dtype is {dtype}, of which transformers leaves out some parameters"
            )
        if getattr(config, "quantization_config", None) is not None:
            raise _NotByNameError("it is quantized")
        folder = _Folder(Path(path))
        try:
            with torch.device("meta"):
                model = auto_class.from_config(
                    config, dtype=dtype, attn_implementation=implementations
                )
            sources, unexpected = _sources(model, folder.shapes)
        except (
            AttributeError,
            ImportError,
            KeyError,
            NotImplementedError,
            RuntimeError,
            TypeError,
        ) as error:
            raise _NotByNameError(
                f"transformers does not make it without memory ({error})"
            ) from error
        ignored: Sequence[str] = model._keys_to_ignore_on_load_unexpected or ()
        for pattern in ignored:
            unexpected = {name for name in unexpected if not re.search(pattern, name)}
        check_layers(path, model, unexpected)
        in_files = {
            id(p) for n, p in model.named_parameters(remove_duplicate=False) if n in sources
        }
        for name in sorted(n for n, p in model.named_parameters() if id(p) not in in_files):
            # A new value head is not in the files; `load_model` refuses one that should be.
            if not name.startswith(model_class.new_weights) or type(model).__name__ in (
                config.architectures or ()
            ):
                raise _NotByNameError(f"its files have no {name}")
        _make_buffers(model, folder, sources, device)
        if model.can_generate() and (Path(path) / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(path)
    except _NotByNameError as error:
        _logger.warning("%s is loaded whole by each process, in %s: %s", path, dtype, error)
        return load_model(model_class, path, attention=attention, dtype=dtype).to(device), None
    return model.eval(), SlicedWeights(folder, sources, dtype=dtype, device=device)


@torch.no_grad()
def make_by_name(
    make: Callable[[], Any], folder: Path, file: str, *, device: torch.device
) -> tuple[Any, "SlicedWeights | None"]:
    """Make a float32 model without its parameters, if files have all of its tensors by their own names.

    Args:
        make: makes the model on the CPU; its parameters need no values.
        file: name of the safetensors file in the folder, of which an index may name several parts.
        device: where parameters and buffers are to be.

    Returns:
        the model, with parameters on the meta device and buffers as in the files, and its parameters in the files;
        None in place of both: it has to be loaded in another way.
    """
    try:
        files = _Folder(folder, file)
        model = make()
        if len(list(model.parameters())) < len(
            list(model.named_parameters(remove_duplicate=False))
        ):
            raise _NotByNameError("it has tied parameters")
        tensors = model.state_dict(keep_vars=True)
        for name, tensor in tensors.items():
            if files.shapes.get(name) != tuple(tensor.shape):
                raise _NotByNameError(f"its files have no {name} of shape {tuple(tensor.shape)}")
    except _NotByNameError as error:
        _logger.warning("%s is loaded whole by each process, in float32: %s", folder, error)
        return None, None
    with files.open_reader() as read:
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.nn.Parameter):
                read(name, tensor, 0, tensor.dtype)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = torch.nn.Parameter(
                    parameter.to("meta"), parameter.requires_grad
                )
    _move_buffers(model, device)
    sources = {name: name for name in tensors}
    return model, SlicedWeights(files, sources, dtype=torch.float32, device=device)


class SlicedWeights:
    """The parameters of one model in a folder's files.

    Args:
        sources: tensors in the files, by the names of parameters.
        dtype: the model's data type, which it is checked in.
        device: where parameters are to be.
    """

    def __init__(
        self,
        folder: "_Folder",
        sources: Mapping[str, _Source],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._folder = folder
        self._sources = sources
        self._dtype = dtype
        self.device = device
        self.lora: LoRAConfig | None = None
        """Adapters of the model, if it has some."""

    @torch.no_grad()
    def fill(self, model: torch.nn.Module) -> None:
        """Allocate the parameters of a model on the meta device, and read them; of shards, this rank's rows.

        Adapters of each set get their initial values, as in `add_lora`, and a new value head is 0.
        """
        allocated: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        start = {} if self.lora is None else read_adapters(self.lora)
        with self._folder.open_reader() as read:
            for name, parameter in parameters.items():
                if parameter not in allocated:
                    allocated[parameter] = torch.nn.Parameter(
                        _zeros(parameter, self.device), parameter.requires_grad
                    )
                into = local(allocated[parameter])
                first = first_row(parameter)
                source = self._sources.get(name.replace(".base_layer.", "."))
                name = trained_name(name)
                if source and name not in start:
                    read(source, into, first, self._dtype)
                elif name in start or name.endswith(A_OF):
                    value = initial_value(name, parameter.shape, start)
                    into.copy_(value[first : first + into.shape[0]])
        # FSDP looks for other parameters before its first pass; the same one under two names stays tied.
        model.load_state_dict(
            {name: allocated[p] for name, p in parameters.items()}, strict=False, assign=True
        )

    @contextmanager
    def checking(self, packed: Any) -> Generator[None]:
        """Compute passes in the model's own data type, and on each rank all of a row.

        A layer's parameters are converted for its own pass, the others for the whole one, as FSDP gathers them.
        """
        parts: list[tuple[torch.nn.Module, list[torch.nn.Module]]] = []
        inner: set[torch.nn.Module] = set()
        for layer in packed.layers():
            modules = list(layer.modules())
            inner.update(modules)
            parts.append((layer, modules))
        parts.insert(
            0, (packed.root, [module for module in packed.root.modules() if module not in inner])
        )
        dtype = packed.compute_dtype
        packed.compute_dtype = self._dtype
        context = packed.context
        packed.context = None
        with ExitStack() as stack:
            stack.callback(setattr, packed, "compute_dtype", dtype)
            stack.callback(setattr, packed, "context", context)
            for part, modules in parts:
                before, after = _conversion(modules, self._dtype)
                stack.callback(part.register_forward_pre_hook(before).remove)
                stack.callback(
                    part.register_forward_hook(after, prepend=True, always_call=True).remove
                )
            try:
                yield
            finally:
                # A forward pass without a backward one leaves some parameters whole.
                if isinstance(packed.root, FSDPModule):
                    packed.root.reshard()


class _Folder:
    """The safetensors files of a Hugging Face folder."""

    def __init__(self, path: Path, single_file: str = SINGLE_FILE) -> None:
        self._path = path
        file_of = tensor_files(path, single_file)
        if file_of is None:
            raise _NotByNameError(f"there is neither {single_file} nor an index of its parts")
        self._file_of = file_of
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name in sorted(set(self._file_of.values())):
            with safe_open(path / name, framework="pt") as file:
                self.shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a dict

    @contextmanager
    def open_reader(self) -> Generator[Callable[[_Source, torch.Tensor, int, torch.dtype], None]]:
        """Yield a function that copies rows of a tensor, from a given one on, into another, after a cast to a dtype."""
        with ExitStack() as stack:
            open_file = cache(
                lambda name: stack.enter_context(safe_open(self._path / name, framework="pt"))
            )

            def read(source: _Source, into: torch.Tensor, first: int, dtype: torch.dtype) -> None:
                if not isinstance(source, str):
                    for expert, keys in zip(into, source[first:], strict=False):
                        sizes = [self.shapes[key][0] for key in keys]
                        for key, rows in zip(keys, expert.split(sizes), strict=True):
                            read(key, rows, 0, dtype)
                    return
                file = open_file(self._file_of[source])
                if not into.ndim:
                    into.copy_(file.get_tensor(source).to(dtype))
                    return
                rows = file.get_slice(source)
                step = max(1, _CHUNK_BYTES // max(1, dtype.itemsize * into[:1].numel()))
                for start in range(0, into.shape[0], step):
                    part = into[start : start + step]
                    part.copy_(rows[first + start : first + start + part.shape[0]].to(dtype))

            yield read


def _sources(
    model: Any, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, _Source], set[str]]:
    """Return the tensors of files by the names of parameters and saved buffers, and those that the model does not have.

    Tied ones are there by one name.

    Raises:
        _NotByNameError: some are to be converted in another way, or two are given for one parameter.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

    transforms: list[Any] = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if not isinstance(t, WeightRenaming)]
    tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    sources: dict[str, _Source] = {}
    unexpected: set[str] = set()
    experts: dict[str, dict[str, list[str]]] = {}
    key_of: dict[int, str] = {}
    for key in sorted(shapes, key=dot_natural_key):
        name, converted = rename_source_key(
            key, renamings, converters, model.base_model_prefix, tensors
        )
        if name not in tensors and key in tensors:
            name, converted = rename_source_key(key, [], [], model.base_model_prefix, tensors)
        if name not in tensors:
            unexpected.add(key)
            continue
        tensor = tensors[name]
        if converted is not None:
            experts.setdefault(name, {}).setdefault(converted, []).append(key)
            continue
        if tuple(tensor.shape) != shapes[key]:
            raise _NotByNameError(
                f"{key} has shape {shapes[key]}, and {name} {tuple(tensor.shape)}"
            )
        # transformers ties two tensors of one folder only if they are equal.
        first_key = key_of.setdefault(id(tensor), key)
        if first_key != key:
            raise _NotByNameError(f"{name} is both {first_key} and {key}")
        sources[name] = key
    for name, keys in experts.items():
        converter = next(c for c in converters if keys.keys() <= set(c.source_patterns))
        sources[name] = _fused_experts(tensors[name], keys, converter, shapes)
    # `save_pretrained` undoes them.
    model._weight_conversions = [t for t in transforms if t.was_used()]
    return sources, unexpected


def _fused_experts(
    tensor: torch.Tensor,
    keys: Mapping[str, Sequence[str]],
    converter: Any,
    shapes: Mapping[str, tuple[int, ...]],
) -> list[tuple[str, ...]]:
    """Return the tensors of files that each expert of a parameter consists of, given by the converter's patterns.

    Raises:
        _NotByNameError: the converter does more than to stack experts, or they do not have the parameter's shape.
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist

    steps = [type(step) for step in converter.operations]
    columns = [keys.get(pattern, ()) for pattern in converter.source_patterns]
    experts = list(zip(*columns, strict=False))
    fused = {(sum(shapes[key][0] for key in e), *shapes[e[0]][1:]) for e in experts}
    if (
        steps not in ([MergeModulelist], [MergeModulelist, Concatenate])
        or set(map(len, columns)) != {len(tensor)}
        or fused != {tuple(tensor.shape[1:])}
    ):
        raise _NotByNameError(f"{next(iter(keys.values()))[0]} is converted on loading")
    return experts


def _make_buffers(
    model: Any, folder: _Folder, sources: Mapping[str, _Source], device: torch.device
) -> None:
    """Compute a model's buffers on the CPU as transformers does on loading; read saved buffers from the files."""
    for parameter in model.parameters():
        setattr(parameter, _INITIALIZED, True)
    with folder.open_reader() as read:
        for name, module in model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                cpu_buffer = torch.empty_like(buffer, device="cpu")
                module._buffers[key] = cpu_buffer
                if key in module._non_persistent_buffers_set:
                    continue
                full_name = f"{name}.{key}" if name else key
                if full_name not in sources:
                    raise _NotByNameError(f"its files have no {full_name}")
                read(sources[full_name], cpu_buffer, 0, cpu_buffer.dtype)
                setattr(cpu_buffer, _INITIALIZED, True)
    model.initialize_weights()
    _move_buffers(model, device)
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise _NotByNameError(f"{name}.{key} is a tensor and no buffer")


def _move_buffers(model: Any, device: torch.device) -> None:
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)


def _zeros(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    shard = torch.zeros(local(parameter).shape, dtype=parameter.dtype, device=device)
    if not isinstance(parameter, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _conversion(
    modules: list[Any], dtype: torch.dtype
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return hooks to call before and after a pass, during which modules have parameters of another data type."""
    replaced: list[tuple[Any, str, torch.nn.Parameter]] = []

    def before(*call: Any) -> None:
        del call
        wide: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.dtype == dtype:
                    continue
                if parameter not in wide:
                    wide[parameter] = torch.nn.Parameter(
                        parameter.detach().to(dtype), requires_grad=False
                    )
                replaced.append((module, name, parameter))
                module._parameters[name] = wide[parameter]

    def after(*call: Any) -> None:
        del call
        for module, name, parameter in replaced:
            module._parameters[name] = parameter
        replaced.clear()

    return before, after
