"""The runs of all apps: settings, folder, logs, metrics, display, report, and the supervisor of their training."""

import lazy_loader as _lazy_loader

__getattr__, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)
