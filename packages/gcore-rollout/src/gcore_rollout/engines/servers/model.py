"""What a server runs, as its client has to know it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from transformers import AutoConfig

from gcore_rollout.engines.vllm.process import TIED_HEAD, checkpoint_shapes, eos_token_ids
from gcore_rollout.errors import UnsupportedModelError


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """What a server tells of itself."""

    model_path: str
    """Where it has the model."""
    max_length: int
    """Longest prompt + completion, in tokens."""
    max_num_seqs: int
    """Most samples to ask for at once, where nobody says otherwise."""
    is_on_cpu: bool = False


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What has to be known of the model that a server runs."""

    path: Path
    max_length: int
    """Longest prompt + completion, in tokens."""
    vocab_size: int
    tied: bool
    shapes: dict[str, tuple[int, ...]]
    """Of the checkpoint's tensors; without the head if that is tied."""
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, path: Path, *, max_length: int) -> Self:
        """Read the model's Hugging Face folder.

        Raises:
            UnsupportedModelError: there is none here, or it has no safetensors.
        """
        if not (path / "config.json").exists():
            raise UnsupportedModelError(
                f"the server runs {path}, which is no model's folder on this machine: "
                "set model_path to a folder here that holds the same model"
            )
        config: Any = AutoConfig.from_pretrained(path).get_text_config()
        tied = bool(config.tie_word_embeddings)
        shapes = {name: shape for name, shape in checkpoint_shapes(path).items() if not (tied and name == TIED_HEAD)}
        return cls(
            path=path,
            max_length=max_length,
            vocab_size=config.vocab_size,
            tied=tied,
            shapes=shapes,
            eos_token_ids=tuple(eos_token_ids(path)),
        )
