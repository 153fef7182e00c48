"""Conversations of agents with an engine, token by token: templates, the graph of a session, and its endpoint.

Nothing here imports torch or another package of gcore. Names are imported when they are first used.
"""

import lazy_loader as _lazy_loader

__getattr__, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)
