"""The Megatron-Core backend: tensor, pipeline, expert and context parallel models of Hugging Face folders."""

import logging
import warnings
from importlib import import_module
from importlib.util import find_spec

from gcore_trainer.errors import make_extra_error

if find_spec("megatron") is None:
    raise make_extra_error("megatron", "megatron")

_cpp_extension = logging.getLogger("torch.utils.cpp_extension")
_level = _cpp_extension.level
with warnings.catch_warnings():
    # As it is imported it warns of every accelerator library that is not installed.
    warnings.simplefilter("ignore")
    _cpp_extension.setLevel(logging.ERROR)
    for _name in (
        "distributed",
        "optimizer",
        "models.gpt",
        "models.gpt.gpt_layer_specs",
        "pipeline_parallel",
    ):
        import_module(f"megatron.core.{_name}")
    _cpp_extension.setLevel(_level)
