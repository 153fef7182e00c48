"""Language models in local Hugging Face folders: checked before a run, with their tokenizers and limits."""

import json
from pathlib import Path
from typing import Any

from gcore_runs.errors import UserError
from gcore_runs.run_folder import check_safetensors

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def check_model(path: Path, *, setting: str = "model") -> None:
    """Check that a folder holds a model.

    Raises:
        UserError: not a Hugging Face folder with weights, or of an architecture that transformers does not know.
    """
    if not (path / "config.json").is_file():
        raise UserError(f"{setting} is {str(path)!r}; expected a Hugging Face folder with config.json")
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(path)
    except (ValueError, OSError) as error:
        raise UserError(f"model folder {path} has a config.json that does not load: {error}") from None
    if not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
        raise UserError(f"model folder {path} has no weights; expected model.safetensors")
    check_safetensors(path)


def build_tokenizer(path: Path) -> Any:
    """Load the model folder's tokenizer.

    Raises:
        UserError: it has none, or one that does not load or has no end-of-sequence token.
    """
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
