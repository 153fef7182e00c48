"""Generation engines and rewards: how RLHF samples are made and scored."""

import lazy_loader as _lazy_loader

__getattr__, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)
