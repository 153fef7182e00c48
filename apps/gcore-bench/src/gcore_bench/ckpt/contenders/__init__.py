"""Checkpoint libraries, each imported only in the process that measures it."""

from importlib import import_module
from pathlib import Path

from gcore_bench.ckpt.contenders.base import Contender

_CLASSES = {
    "gcore": "gcore:Gcore",
    "dcp": "dcp:Dcp",
    "dcp-async-thread": "dcp:DcpThread",
    "dcp-async-process": "dcp:DcpProcess",
    "dcp-async-cached": "dcp:DcpCached",
    "torch.save": "single_file:TorchSave",
    "safetensors": "single_file:Safetensors",
    "orbax": "orbax:Orbax",
    "tensorstore": "tensorstore:Tensorstore",
}


def make_contender(name: str, root: Path) -> Contender:
    """Import a contender's library and set it up to save below ``root``."""
    module, _, attribute = _CLASSES[name].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), attribute)(root)
