"""Placement of RLHF work: costs of the roles of a job, even division of work, and plans for all roles.

Pure and light: numpy is the only dependency, and nothing here touches a device. Names are imported when they are first
used.
"""

import lazy_loader as _lazy_loader

__getattr__, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)
