"""Check that a model's files are complete, before a run."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from gcore_runs.errors import UserError, one_line


def check_safetensors(folder: Path) -> None:
    """
    Raises:
        UserError: a safetensors file of the folder is damaged, or one that an index names is missing.
    """
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
