"""Everything this package raises on purpose."""


class ControllerError(Exception):
    """Base of this package's errors."""


class CollectiveMismatchError(ControllerError):
    """Controllers met in different collectives: their programs went different ways."""


class MissingExtraError(ControllerError, ImportError):
    """An optional dependency is not installed; the message holds the install command."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(f"{module!r} is not installed: pip install 'gcore-controller[{extra}]'")


class ClusterError(ControllerError):
    """A cluster has no room for a run."""


class ControllerDiedError(ControllerError):
    """A controller's process or node was lost."""


class ReferenceLostError(ControllerError):
    """A reference's value is gone."""


class DeadlineError(ControllerError):
    """A run took longer than it may."""


class StuckError(ControllerError):
    """A simulated run waits for what never comes."""


class StateError(ControllerError, ValueError):
    """A saved state does not fit: it belongs to another data set or another sampler."""
