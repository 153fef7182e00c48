"""Check before a run that a pipeline's folder is complete."""

import json
from pathlib import Path
from typing import Any

from gcore_runs.errors import UserError
from gcore_runs.weights_files import check_safetensors


def check_pipeline(model: Path) -> None:
    """
    Raises:
        UserError: not a folder of a diffusers pipeline, one that lacks a component, or has damaged weights.
    """
    index = model / "model_index.json"
    if not index.is_file():
        raise UserError(f"model is {str(model)!r}; expected a folder of a diffusers pipeline, with model_index.json")
    try:
        components: Any = json.loads(index.read_text())
    except ValueError as error:
        raise UserError(f"{index} is not JSON: {error}") from None
    if not isinstance(components, dict):
        raise UserError(f"{index} is {type(components).__name__}; expected a JSON object")
    for name, value in components.items():
        # A library and a class; the pipeline does without components that are null.
        if name.startswith("_") or not isinstance(value, list) or None in value:
            continue
        if not (model / name).is_dir():
            # diffusers would look for its files in the pipeline's own folder, and make an empty tokenizer without any.
            raise UserError(f"model folder {model} lacks the folder {name}, which model_index.json names")
        check_safetensors(model / name)
