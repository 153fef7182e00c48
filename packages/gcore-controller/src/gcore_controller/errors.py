"""Everything this package raises on purpose."""


class ControllerError(Exception):
    """Base of this package's errors."""


class CollectiveMismatchError(ControllerError):
    """Controllers met in different collectives: their programs went different ways."""


class StateError(ControllerError, ValueError):
    """A saved state does not fit: it belongs to another data set or another sampler."""
