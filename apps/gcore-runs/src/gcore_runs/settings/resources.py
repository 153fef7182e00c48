"""The resources that a run's settings name: a device, models and data, with fingerprints of their files."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from hashlib import blake2b
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gcore_runs.data.rows import expand_pattern
from gcore_runs.errors import UserError
from gcore_runs.settings.checks import flatten_settings, nest
from gcore_runs.settings.parsing import merge, read_toml
from gcore_runs.settings.run_config import BaseRLConfig, BaseRunConfig
from gcore_runs.settings.sections import AdapterSettings
from gcore_trainer import ConfigError, LoRAConfig, read_lora_config

if TYPE_CHECKING:
    import torch

ConfigT = TypeVar("ConfigT", bound=BaseRunConfig)
SettingsT = TypeVar("SettingsT", bound=AdapterSettings)

_MAX_THREADS = 4096
_HUB_MODEL = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[^\s:]+)?")
_ROWS = ("data.train_files", "data.val_files")
_CODE = re.compile(r"(.+\.py)(:\w+)?")
"""A file with a function of the user, such as a reward."""
_NAMED_SET = re.compile(r"[\w.-]+=(.+)")
_MODEL_SUFFIXES = (".safetensors", ".bin", ".json", ".txt", ".model", ".jinja")
_BLOCK_BYTES = 1 << 16
_WHOLE_BYTES = 1 << 28
"""Files of rows and of code are read whole up to this size; of larger ones so much is read."""
_WHOLE_MODEL_BYTES = 1 << 20
"""The same of each file of a model, whose weights may be hundreds of GB."""


def resolve(config: ConfigT, *, is_local: bool = False) -> ConfigT:
    """Return the settings with ``threads``, ``device`` and ``dtype`` of this machine in place of 0 and auto.

    On a Ray cluster the device is that of its nodes, unless ``is_local``: then models are loaded in this process.

    Models and data on the Hugging Face Hub get the commit that they have now. A run that is resumed keeps its commits,
    and its data type, whatever auto was when it began. `UserError` for a name that the Hub does not have.
    """
    if config.threads > _MAX_THREADS:
        raise UserError(
            f"threads is {config.threads}; expected at most {_MAX_THREADS}, or 0 for one a core"
        )
    if isinstance(config, BaseRLConfig) and config.runtime == "ray":
        device = _resolve_device("auto") if is_local else _resolve_device_on_cluster(config)
    else:
        device = _resolve_device(config.device)
    changes: dict[str, Any] = {
        "threads": config.threads or len(os.sched_getaffinity(0)),
        "device": device,
    }
    if getattr(config, "dtype", "") == "auto":
        dtype = str(_read_resumed(config).get("dtype", "auto"))
        if dtype == "auto":
            dtype = "bfloat16" if device.startswith("cuda") else "float32"
        changes["dtype"] = dtype
    resolved = replace(config, **changes)
    models = _models(config)
    data = getattr(config, "data", None)
    sources: dict[str, Sequence[str]] = {}
    if data:
        sources = {f"data.{name}": getattr(data, name) for name in ("train_files", "val_files")}
    model_names = chain.from_iterable(
        [value] if isinstance(value, str) else value for value in models.values()
    )
    is_on_hub = any(map(is_hub_model, model_names))
    if is_on_hub or any("hf://" in source for source in chain.from_iterable(sources.values())):
        from gcore_runs.data.hub import pin_revisions

        return merge(
            resolved, nest(pin_revisions(models, sources, _read_resumed(config), is_hub_model))
        )
    return resolved


def _resolve_device(device: str) -> str:
    """Return a device of this machine, as torch names it; `UserError` if it has none of this name."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    index = _parse_device(device).index or 0
    if device.startswith("cuda") and index >= torch.cuda.device_count():
        raise UserError(
            f"device is {device!r}; expected one of this machine's {torch.cuda.device_count()} CUDA devices"
        )
    return device


def _resolve_device_on_cluster(config: BaseRLConfig) -> str:
    """Check the cluster, and return the device of its nodes, as torch names it."""
    from gcore_runs.settings.cluster import check_cluster, cluster_address, resolve_device

    check_cluster(config.ray)
    if not cluster_address(config.ray):
        # The cluster is going to be this machine.
        return _resolve_device(config.device)
    device = resolve_device(config.device, config.ray)
    _parse_device(device)
    return device


def _parse_device(device: str) -> "torch.device":
    """Return a device as torch has it; `UserError` if it is none."""
    import torch

    try:
        return torch.device(device)
    except RuntimeError:
        raise UserError(f"device is {device!r}; expected cpu, cuda, cuda:NUMBER or auto") from None


def _models(config: BaseRunConfig) -> dict[str, str | Sequence[str]]:
    """Return the folders and names of the run's models, by dotted name."""
    models: dict[str, str | Sequence[str]] = {}
    for name in config.model_settings:
        table, is_table, field = name.partition(".*.")
        value = attrgetter(table)(config)
        if is_table:
            for key, entry in value.items():
                models[f"{table}.{key}.{field}"] = getattr(entry, field)
        else:
            models[name] = value
    return models


def with_adapter(
    settings: SettingsT, read: Callable[[str], LoRAConfig] = read_lora_config
) -> SettingsT:
    """Return settings with rank, alpha, layers and scale of the adapters that they start from.

    Args:
        read: returns those of the adapters at a path.

    Raises:
        UserError: there are no such adapters, or other settings are given.
    """
    if not settings.lora_adapter_path:
        return settings
    where = f"{settings.section}.".lstrip(".")
    try:
        adapter = read(settings.lora_adapter_path)
    except ConfigError as error:
        raise UserError(f"{where}lora_adapter_{error}") from None
    adapter_values = {
        "lora_rank": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": adapter.target_modules,
        "use_rslora": adapter.use_rslora,
    }
    defaults = {field.name: field.default for field in fields(settings)}
    for name, value in adapter_values.items():
        configured = getattr(settings, name)
        if configured not in (defaults[name], value):
            raise UserError(
                f"{where}{name} is {configured!r}; expected {value!r}, as the adapters in "
                f"{settings.lora_adapter_path} have, or none set"
            )
    return replace(settings, **adapter_values)


def is_hub_model(name: str) -> bool:
    """Return whether a name is of a model on the Hub, ``NAMESPACE/NAME[@REVISION]``, and not of a folder there is."""
    return _HUB_MODEL.fullmatch(name) is not None and not Path(name).exists()


def _read_resumed(config: BaseRunConfig) -> dict[str, Any]:
    """Return the settings of the run that these resume, as its file has them; none: there is no such run."""
    folder = Path(config.runs_dir) / config.name
    is_resumed = (folder / "model").is_dir() or any((folder / "checkpoints").glob("*"))
    if config.resume == "never" or not is_resumed or not (folder / "config.toml").is_file():
        return {}
    return read_toml(folder / "config.toml")


def content_fingerprints(config: BaseRunConfig) -> dict[str, str]:
    """Return a hash of the files that each setting names; see `take_fingerprints`."""
    return take_fingerprints(flatten_settings(config), _models(config))


def is_of_code(config: BaseRunConfig, setting: str) -> bool:
    """Return whether the files of a setting, which have a fingerprint, are code of the user's."""
    return names_code(setting, _models(config))


def take_fingerprints(values: Mapping[str, Any], models: Collection[str]) -> dict[str, str]:
    """Return a hash of the files that each setting names, by the setting's dotted name.

    Of large files the size is hashed, and blocks at even distances. What a file refers to, such as images or imported
    modules, is not read. Names on the Hugging Face Hub are no files: they hold a commit.

    Args:
        values: the settings, by dotted name.
        models: names of the settings that are folders of models.
    """
    fingerprints: dict[str, str] = {}
    for name, value in values.items():
        max_bytes = _WHOLE_BYTES
        find_files = _code_files
        if _names_model(name, models):
            max_bytes = _WHOLE_MODEL_BYTES
            find_files = _model_files
        elif name in _ROWS:
            find_files = _row_files
        files: list[Path] = []
        for text in _texts(value):
            files.extend(find_files(text))
        if files:
            fingerprints[name] = _hash(files, max_bytes)
    return fingerprints


def names_code(setting: str, models: Collection[str]) -> bool:
    """Return whether the files that a setting names are code of the user's."""
    return not (setting in _ROWS or _names_model(setting, models))


def _names_model(setting: str, models: Collection[str]) -> bool:
    return setting in models or setting.endswith("lora_adapter_path")


def _texts(value: Any) -> list[str]:
    """Return the texts of a setting that is one, or a list."""
    entries = value if isinstance(value, list | tuple) else [value]
    return [entry for entry in entries if isinstance(entry, str) and entry]


def _model_files(path: str) -> list[Path]:
    files = [Path(path)] if Path(path).is_file() else Path(path).rglob("*")
    return sorted(file for file in files if file.suffix in _MODEL_SUFFIXES)


def _row_files(source: str) -> list[Path]:
    """Return the files of a source of rows: a file, a pattern, or NAME= and one of both."""
    named_set = _NAMED_SET.fullmatch(source)
    if named_set is not None and not Path(source).exists():
        source = named_set[1]
    return [Path(path) for path in expand_pattern(source) if Path(path).is_file()]


def _code_files(text: str) -> list[Path]:
    code = _CODE.fullmatch(text)
    if code is None or not Path(code[1]).is_file():
        return []
    return [Path(code[1])]


def _hash(files: list[Path], max_bytes: int) -> str:
    digest = blake2b(digest_size=16)
    for file in files:
        digest.update(file.stat().st_size.to_bytes(8, "little"))
        for block in _sample(file, max_bytes):
            digest.update(block)
    return digest.hexdigest()


def _sample(file: Path, max_bytes: int) -> Iterator[bytes]:
    """Yield a file's blocks: all of them, or as many as ``max_bytes`` hold, from the first one to the last."""
    size = file.stat().st_size
    num_blocks = -(-min(size, max_bytes) // _BLOCK_BYTES)
    last = max(0, size - _BLOCK_BYTES)
    with file.open("rb") as opened:
        for index in range(num_blocks):
            if size > max_bytes:
                opened.seek(last * index // (num_blocks - 1))
            yield opened.read(_BLOCK_BYTES)
