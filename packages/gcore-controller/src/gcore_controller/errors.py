"""Everything this package raises on purpose."""


class ControllerError(Exception):
    """Base of this package's errors."""


class CollectiveMismatchError(ControllerError):
    """Controllers met in different collectives: their programs went different ways."""


class DeadlineError(ControllerError):
    """A run took longer than it may."""


class StuckError(ControllerError):
    """A simulated run waits for what never comes."""


class StateError(ControllerError, ValueError):
    """A saved state does not fit: it belongs to another data set or another sampler."""
