"""The errors that this package raises."""

from typing import Any


class ControllerError(Exception):
    """Base class of this package's errors."""


class CollectiveError(ControllerError):
    """Controllers called different collectives, or one cannot take part in them any more."""


class UnpicklableValueError(ControllerError, TypeError):
    """A value cannot be sent to another process."""


class ClusterError(ControllerError):
    """A cluster lacks the capacity for a run."""


class ControllerDiedError(ControllerError):
    """A controller's process or node was lost."""


class RankError(ControllerError):
    """A training rank died, or another one lost it, and with it the trainer group."""


class DeviceError(RankError):
    """The device of a training rank failed, and with it the trainer group."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.rank)


class RankCodeError(ControllerError):
    """The code of a training rank raised an error, with its traceback: starting the ranks again would not help."""


class StuckError(ControllerError):
    """A simulated run waits for something that never happens."""


class _MissingExtraError(ControllerError, ImportError):
    """Also an ImportError, without which a process that imports modules before their use ends."""


def make_extra_error(module: str, extra: str) -> ControllerError:
    """Return the error for an optional dependency that is not installed, with the install command."""
    return _MissingExtraError(
        f"{module!r} is not installed: pip install 'gcore-controller[{extra}]'"
    )
