"""The Megatron-Core backend: tensor, pipeline, expert and context parallel models of Hugging Face folders."""

from importlib.util import find_spec

from gcore_trainer.errors import TrainerError


class MissingExtraError(TrainerError, ImportError):
    """An optional dependency is not installed; the message holds the install command."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(f"{module!r} is not installed: pip install 'gcore-trainer[{extra}]'")


if find_spec("megatron") is None:
    raise MissingExtraError("megatron", "megatron")
