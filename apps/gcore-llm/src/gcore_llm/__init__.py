"""LLM RLHF: the command `gcore-llm`, and the same from Python.

``train(TrainConfig(...))`` runs what ``gcore-llm train`` does, without a screen; ``fine_tune`` takes the settings of
``gcore-llm sft``, ``reward-model`` and ``dpo``.
"""

import lazy_loader as _lazy_loader

__getattr__, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)
