"""RLHF of diffusion models: the command `gcore-diffusion`, and the same from Python.

``train(DiffusionConfig(...))`` runs what ``gcore-diffusion train`` does, without a screen.
"""

import lazy_loader as _lazy_loader

__getattr__, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)
