"""The Megatron-Core backend: tensor, pipeline, expert and context parallel models of Hugging Face folders."""

from importlib.util import find_spec

from gcore_trainer.errors import MissingExtraError

if find_spec("megatron") is None:
    raise MissingExtraError("megatron", "megatron")
