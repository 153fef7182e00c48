"""Fingerprints of the files that settings name, which a resumed run compares with those that it was started with."""

import re
from collections.abc import Collection, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from gcore_runs.data.rows import expand_pattern

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
