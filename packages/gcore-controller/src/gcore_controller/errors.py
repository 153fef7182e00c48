"""The errors that this package raises."""


class ControllerError(Exception):
    """Base class of this package's errors."""


class CollectiveMismatchError(ControllerError):
    """Controllers called different collectives, or one returned while others wait for it."""


class CollectiveAbandonedError(ControllerError):
    """A rank's part in a collective was cancelled or failed, and the channel was used again."""


class ConcurrentCollectivesError(ControllerError):
    """A rank called two collectives at once on one channel."""


class UnpicklableValueError(ControllerError, TypeError):
    """A value cannot be sent to another process."""


class ProgramExitedError(ControllerError):
    """A program ended neither by returning nor by an error: it called sys.exit or cancelled itself."""


class MissingExtraError(ControllerError, ImportError):
    """An optional dependency is not installed; the message holds the install command."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(f"{module!r} is not installed: pip install 'gcore-controller[{extra}]'")


class ClusterError(ControllerError):
    """A cluster lacks the capacity for a run."""


class ControllerDiedError(ControllerError):
    """A controller's process or node was lost."""


class ReferenceLostError(ControllerError):
    """The value of a reference is lost."""


class RankError(ControllerError):
    """A training rank died, or another one lost it, and with it the trainer group."""


class RankCodeError(ControllerError):
    """The code of a training rank raised an error, with its traceback: starting the ranks again would not help."""


class DeadlineError(ControllerError):
    """A run took longer than its limit."""


class StuckError(ControllerError):
    """A simulated run waits for something that never happens."""


class StateError(ControllerError, ValueError):
    """A saved state belongs to another data set or another sampler."""


class RewardFailuresError(ControllerError):
    """Too large a share of the reward calls failed."""
