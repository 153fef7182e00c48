"""A user's inputs: rows of data files, and language models in Hugging Face folders, with tokenizers and limits."""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from gcore_runs.data.rows import RowSource, expand_pattern
from gcore_runs.errors import UserError
from gcore_runs.logs import one_line
from gcore_runs.run_folder import json_object
from gcore_runs.settings.resources import is_hub_model
from gcore_runs.settings.sections import BaseDataConfig

if TYPE_CHECKING:
    from gcore_controller import Mixture

RowT = TypeVar("RowT")

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


_QUANTIZED_DTYPES = ("I8", "U8", "F8", "F6", "F4")
"""Data types of quantized weights, as safetensors spells their beginnings."""

_SUFFIXES = (".jsonl", ".parquet", ".arrow", ".csv")
_ACCEPTED = "a .jsonl, .parquet, .arrow or .csv file"
LARGE_BYTES = 2**23
"""Files of more bytes than this are memory-mapped, and smaller ones held in memory."""


def open_rows(
    source: str, columns: Mapping[str, str] | None = None, *, setting: str = "data.train_files"
) -> list[RowSource]:
    """Open a source of rows: each file that a pattern matches, or a data set on the Hub.

    Args:
        source: a ``.jsonl``, ``.parquet``, ``.arrow`` or ``.csv`` file, a pattern of such files with ``*``, or
            ``hf://NAMESPACE/NAME[@REVISION][/SUBSET][:SPLIT]``. Together more than 8 MiB are memory-mapped.
        columns: columns to add to each row, or to replace, by name: Jinja expressions of its columns, such as
            ``answer.split('####')[-1].strip()``.
        setting: named in errors of the Hub.

    Raises:
        UserError: it is missing, unreadable, malformed or empty; of large JSONL files, lines are read when needed.
    """
    if not source:
        raise UserError(
            f"{setting} holds an empty name; expected {_ACCEPTED}, or a data set on the Hub"
        )
    if source.startswith("hf://"):
        from gcore_runs.data.tables import open_dataset

        parts = [open_dataset(source, setting=setting, large_bytes=LARGE_BYTES)]
    else:
        paths = expand_pattern(source)
        if not paths:
            raise UserError(f"data file {source} does not exist: no file matches the pattern")
        files = [_check_file(path) for path in paths]
        is_large = sum(file.stat().st_size for file in files) > LARGE_BYTES
        parts = [_rows_of(file, is_large=is_large) for file in files]
    for rows in parts:
        if not len(rows.rows):
            raise UserError(f"data file {rows.name} has no rows")
    if not columns:
        return parts
    from gcore_runs.data.columns import with_columns

    return [with_columns(rows, columns) for rows in parts]


def _check_file(path: str) -> Path:
    file = Path(path)
    if file.is_dir():
        raise UserError(f"data file {path} is a folder; expected {_ACCEPTED}")
    if not file.is_file():
        raise UserError(f"data file {path} does not exist")
    if file.suffix not in _SUFFIXES:
        raise UserError(f"data file {path} ends in {file.suffix!r}; expected {_ACCEPTED}")
    return file


def _rows_of(file: Path, *, is_large: bool) -> RowSource:
    try:
        if file.suffix != ".jsonl" or is_large:
            from gcore_runs.data.tables import open_file

            return open_file(file, is_large=is_large)
        lines = read_lines(file)
    except OSError as error:
        raise UserError(f"data file {file} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"data file {file} is not UTF-8: {error}") from None
    rows = [json_object(line, f"{file}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    return RowSource(name=str(file), rows=rows, folder=file.parent)


def read_lines(path: Path) -> list[str]:
    r"""Return the lines of a UTF-8 file, which may have a byte order mark; only \n and \r\n end them."""
    # Unlike this, splitlines takes other characters for line ends, too, which texts and JSON strings may contain.
    return [line.removesuffix("\r") for line in path.read_bytes().decode("utf-8-sig").split("\n")]


def columns(row: Mapping[str, Any]) -> str:
    """Return the names of a row's columns, for errors."""
    return ", ".join(map(repr, row)) or "none"


def image_sources(
    row: Mapping[str, Any], key: str, folder: Path, where: str
) -> tuple[bytes | Path | str, ...]:
    """Return the encoded images in a row's column, or their paths or URLs.

    There may be none, one, or a list, each a path relative to ``folder``, a URL of an object store, a ``data:`` URI,
    the bytes of an image file, or a mapping with one of these. `UserError`, which names ``where``, for something else,
    for URLs of the web, and for files that do not exist.
    """
    values: Any = row.get(key)
    if values is None:
        return ()
    if not isinstance(values, list):
        values = [values]
    return tuple(_image_source(value, folder, where) for value in values)


def _image_source(value: object, folder: Path, where: str) -> bytes | Path | str:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("image")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise UserError(f"{where} is {value!r:.80}; expected a path, or the bytes of an image file")
    if value.startswith(("http://", "https://")):
        raise UserError(
            f"{where} is {value!r:.80}; expected a path, a data: URI or the bytes of an image file: nothing is fetched "
            "from the web, so download it first"
        )
    if "://" in value:
        return value
    if value.startswith("data:"):
        data = value.partition(";base64,")[2]
        with suppress(ValueError):
            image = base64.b64decode(data, validate=True)
            if image:
                return image
        raise UserError(f"{where} is {value!r:.80}; expected data:image/png;base64, and base64")
    path = folder / value
    if not path.is_file():
        raise UserError(f"{where} is {value!r}; expected an existing file")
    return path


def hold_out(
    parts: Sequence[list[RowT]], *, size: int, seed: int
) -> tuple[list[list[RowT]], list[RowT]]:
    """Return the rows of each part to train on, and ``size`` held-out ones of all (at most a tenth), in their order."""
    indices = held_out_places(list(map(len, parts)), size=size, seed=seed)
    train: list[list[RowT]] = []
    val: list[RowT] = []
    for part, val_indices in zip(parts, indices, strict=True):
        excluded = set(val_indices)
        train.append([row for index, row in enumerate(part) if index not in excluded])
        val.extend(part[index] for index in val_indices)
    return train, val


def held_out_places(sizes: Sequence[int], *, size: int, seed: int) -> list[list[int]]:
    """Return the places within each part of the rows that `hold_out` holds out, ascending, for parts of these sizes."""
    rng = np.random.default_rng(seed)
    num_rows = sum(sizes)
    size = min(size, num_rows // 10)
    # The first entries of a permutation, except where that would take much memory.
    drawn = (
        rng.permutation(num_rows)[:size]
        if num_rows <= 2**20
        else rng.choice(num_rows, size, replace=False)
    )
    drawn = np.sort(drawn)
    ends = np.cumsum([0, *sizes])
    return [
        (drawn[(first <= drawn) & (drawn < end)] - first).tolist() for first, end in pairwise(ends)
    ]


def mix_sets(parts: Sequence[Sequence[RowT]], data: BaseDataConfig) -> "Mixture[RowT]":
    """Return the rows of all data.train-files, each with its data.weights.

    Raises:
        UserError: these are not one number above a thousandth of their sum for each source, or one has no rows left.
    """
    weights = data.weights
    if len(weights) != len(parts) or not 0 < sum(weights) <= 1000 * min(weights):
        raise UserError(
            f"data.weights is {weights}; expected {len(parts)} numbers, one for each of data.train_files, each at "
            "least 0.001 of their sum"
        )
    for source, part in zip(data.train_files, parts, strict=True):
        if not len(part):
            raise UserError(
                f"data file {source} has no rows left to train on; expected some, as it is in data.weights"
            )
    from gcore_controller import Mixture

    return Mixture(parts, data.weights)


def model_folder(name: str, *, setting: str = "model") -> Path:
    """Return the folder of a model: the one of this path, or else what the Hub has under this name.

    That is downloaded once. `UserError`, which names ``setting``, if the Hub has no such model, or cannot be reached.
    """
    if not is_hub_model(name):
        return Path(name)
    from gcore_runs.data.hub import download_model

    return download_model(name, setting=setting)


def check_model(path: Path, *, setting: str = "model", may_be_quantized: bool = False) -> None:
    """Raise `UserError` unless it is a Hugging Face folder with weights of an architecture that transformers knows.

    ``may_be_quantized``: whether the model is for an engine that may compute with quantized weights, such as vLLM.
    """
    has_adapters = (path / "adapter_config.json").is_file()
    if not (path / "config.json").is_file():
        message = f"{setting} is {str(path)!r}; expected a Hugging Face folder with config.json"
        if has_adapters:
            message += "; it has adapters, which start a run from their base model (lora_adapter_path), or are "
            message += "exported merged (export_merged)"
        raise UserError(message)
    if has_adapters:
        # transformers would load them onto the model without a word.
        raise UserError(
            f"{setting} is {str(path)!r}, which holds a model (config.json) and adapters (adapter_config.json); "
            "expected only a model: move the adapters to a folder of their own, from which a run starts by "
            "actor.lora_adapter_path"
        )
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(path)
    except Exception as error:
        # The parsers and the checks of the classes raise errors of many types.
        raise UserError(
            f"model folder {path} has a config.json that does not load: {one_line(error)}"
        ) from None
    if (path / "generation_config.json").is_file():
        _read_json(path / "generation_config.json")
    if not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
        raise UserError(f"model folder {path} has no weights; expected model.safetensors")
    check_safetensors(path)
    if not may_be_quantized:
        _check_not_quantized(path, config, setting)


def _check_not_quantized(path: Path, config: Any, setting: str) -> None:
    accepted = "expected weights in float32, bfloat16 or float16: convert it first"
    for part in (config, config.get_text_config()):
        quantization = getattr(part, "quantization_config", None)
        if quantization is not None:
            raise UserError(
                f"{setting} is {str(path)!r}, whose config.json has quantization_config; {accepted}"
            )
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            names: list[str] = list(tensors.keys())
            for name in names:
                dtype: str = tensors.get_slice(name).get_dtype()
                # Masks, which old files have too, are not called weights.
                if name.endswith("weight") and dtype.startswith(_QUANTIZED_DTYPES):
                    raise UserError(
                        f"{setting} is {str(path)!r}, whose {name} is quantized ({dtype}); {accepted}"
                    )


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; `UserError` if it has none."""
    try:
        return json_object(path.read_text(), str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error}") from None


def build_tokenizer(path: Path) -> Any:
    """Load the model folder's tokenizer.

    Raises:
        UserError: none loads, it has no end-of-sequence token, or its chat template does not end; see
            `check_chat_template`.
    """
    from transformers import AutoTokenizer

    from gcore_runs.data.chat_template import check_chat_template

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
        raise UserError(
            f"model folder {path}: its tokenizer has no eos_token, so no response could end"
        )
    check_chat_template(tokenizer, f"model folder {path}")
    return tokenizer


def eos_token_ids(tokenizer: Any, model: Path | None) -> list[int]:
    """Return the tokens that end a response: the tokenizer's, and those of the model folder's generation settings."""
    ids = {tokenizer.eos_token_id}
    if model is not None:
        settings = model / "generation_config.json"
        if not settings.is_file():
            settings = model / "config.json"
        declared = _read_json(settings).get("eos_token_id")
        ids.update(declared if isinstance(declared, list) else [declared])
    return sorted(ids - {None})


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
    original = rope.get("original_max_position_embeddings")
    factor = rope.get("factor")
    if original and factor:
        return max(limit, round(original * factor))
    return limit


def check_safetensors(folder: Path) -> None:
    """Raise `UserError` if a safetensors file of the folder is damaged, or one that an index names is missing."""
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{index} is no index of weights: {type(error).__name__}: {error}"
            ) from None
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise UserError(
                f"model folder {folder} lacks {', '.join(missing)}, which {index.name} names"
            )
    for file in sorted(folder.glob("*.safetensors")):
        try:
            # Only the header is read, which has the file's length.
            with safe_open(file, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file} is damaged, or was not copied to its end: {one_line(error)}"
            ) from None


def count_parameters(folder: Path) -> int:
    """Count the parameters of a model folder by the headers of its safetensors files; 0 if it has none."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            names: list[str] = list(tensors.keys())
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    return total
