"""Asynchronous, resharding, atomic, verified checkpoints for training loops.

A save stalls the caller only for the copy out of live memory; a checkpoint exists whole or not at all; any number of
ranks loads what any other number has saved.
"""

import lazy_loader as _lazy_loader

__getattr__, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)
