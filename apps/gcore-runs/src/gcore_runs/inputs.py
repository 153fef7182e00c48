"""A user's inputs: rows of data files, and language models in Hugging Face folders, with tokenizers and limits."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from gcore_runs.errors import UserError, one_line
from gcore_runs.run_folder import json_object

RowT = TypeVar("RowT")

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def read_rows(path: str) -> list[dict[str, Any]]:
    """Read the rows of a JSONL or Parquet file; `UserError` if it is missing, unreadable, malformed or empty."""
    file = Path(path)
    if file.is_dir():
        raise UserError(f"data file {path} is a folder; expected a .jsonl or .parquet file")
    if not file.is_file():
        raise UserError(f"data file {path} does not exist")
    try:
        rows = _rows_of(file)
    except OSError as error:
        raise UserError(f"data file {path} cannot be read: {error.strerror or error}") from None
    if not rows:
        raise UserError(f"data file {path} has no rows")
    return rows


def read_lines(path: Path) -> list[str]:
    r"""Return the lines of a UTF-8 file, which may have a byte order mark; only \n and \r\n end them."""
    # Unlike this, splitlines takes other characters for line ends, too, which texts and JSON strings may contain.
    return [line.removesuffix("\r") for line in path.read_bytes().decode("utf-8-sig").split("\n")]


def _rows_of(path: Path) -> list[dict[str, Any]]:
    match path.suffix:
        case ".jsonl":
            try:
                lines = read_lines(path)
            except UnicodeDecodeError as error:
                raise UserError(f"data file {path} is not UTF-8: {error}") from None
            return [json_object(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
        case ".parquet":
            import pyarrow.parquet

            try:
                return pyarrow.parquet.read_table(path).to_pylist()
            except pyarrow.ArrowException as error:
                raise UserError(f"data file {path} is not Parquet: {error}") from None
        case _:
            raise UserError(f"data file {path} ends in {path.suffix!r}; expected .jsonl or .parquet")


def columns(row: Mapping[str, Any]) -> str:
    """Return the names of a row's columns, for errors."""
    return ", ".join(map(repr, row)) or "none"


def image_sources(row: Mapping[str, Any], key: str, folder: Path, where: str) -> tuple[bytes | Path, ...]:
    """Return the encoded images in a row's column, or their paths.

    There may be none, one, or a list, each a path relative to ``folder``, the bytes of an image file, or a mapping with
    either. `UserError`, which names ``where``, for something else and for files that do not exist.
    """
    found = row.get(key)
    values: Sequence[object] = found if isinstance(found, list) else [] if found is None else [found]
    return tuple(_image_source(value, folder, where) for value in values)


def _image_source(value: object, folder: Path, where: str) -> bytes | Path:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("image")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise UserError(f"{where} is {value!r:.80}; expected a path, or the bytes of an image file")
    path = folder / value
    if not path.is_file():
        raise UserError(f"{where} is {value!r}; expected an existing file")
    return path


def hold_out(rows: Sequence[RowT], *, size: int, seed: int) -> tuple[list[RowT], list[RowT]]:
    """Return the rows to train on, and ``size`` held-out ones drawn by ``seed`` (at most a tenth), in their order."""
    order = np.random.default_rng(seed).permutation(len(rows))
    held_out = set(order[: min(size, len(rows) // 10)].tolist())
    return [r for i, r in enumerate(rows) if i not in held_out], [rows[i] for i in sorted(held_out)]


def check_model(path: Path, *, setting: str = "model") -> None:
    """Raise `UserError` unless it is a Hugging Face folder with weights of an architecture that transformers knows."""
    if not (path / "config.json").is_file():
        adapters = "; it has adapters, which start a run from their base model (lora_adapter_path), or are exported "
        hint = f"{adapters}merged (export_merged)" if (path / "adapter_config.json").is_file() else ""
        raise UserError(f"{setting} is {str(path)!r}; expected a Hugging Face folder with config.json{hint}")
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(path)
    except (ValueError, OSError) as error:
        raise UserError(f"model folder {path} has a config.json that does not load: {error}") from None
    if not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
        raise UserError(f"model folder {path} has no weights; expected model.safetensors")
    check_safetensors(path)


def build_tokenizer(path: Path) -> Any:
    """Load the model folder's tokenizer; `UserError` if none loads, or it has no end-of-sequence token."""
    from transformers import AutoTokenizer

    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(
            f"model folder {path} has no tokenizer; expected tokenizer.json (save_pretrained of the tokenizer)"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:
        # The parsers raise errors of many types.
        raise UserError(
            f"model folder {path} has a tokenizer that does not load: {type(error).__name__}: {error}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"model folder {path}: its tokenizer has no eos_token, so no response could end")
    return tokenizer


def eos_token_ids(tokenizer: Any, model: Path | None) -> list[int]:
    """Return the tokens that end a response: the tokenizer's, and those of the model folder's generation settings."""
    declared = None
    if model is not None:
        generation = model / "generation_config.json"
        settings = generation if generation.is_file() else model / "config.json"
        declared = json.loads(settings.read_text()).get("eos_token_id")
    ids = {tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])}
    return sorted(i for i in ids if i is not None)


def max_sequence_length(model: Path) -> int | None:
    """Return how many tokens a model takes, prompt and response together; None: any number.

    Beyond that, a model with learned positions has no embedding, and one with rotary positions was not trained.
    """
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(model).get_text_config()
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    return max(limit, round(original * factor)) if original and factor else limit


def check_safetensors(folder: Path) -> None:
    """Raise `UserError` if a safetensors file of the folder is damaged, or one that an index names is missing."""
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index} is no index of weights: {type(error).__name__}: {error}") from None
        if missing := [name for name in shards if not (folder / name).is_file()]:
            raise UserError(f"model folder {folder} lacks {', '.join(missing)}, which {index.name} names")
    for file in sorted(folder.glob("*.safetensors")):
        try:
            # Only the header is read, which has the file's length.
            with safe_open(file, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is damaged, or was not copied to its end: {one_line(error)}") from None


def count_parameters(folder: Path) -> int:
    """Count the parameters of a model folder by the headers of its safetensors files; 0 if it has none."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            names: list[str] = list(tensors.keys())
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    return total
