"""Errors of the package.

Wrong arguments (a step below zero, a leaf of an unknown type) are `ValueError` and `TypeError`: they are bugs of the
caller, and a training loop that tolerates `CheckpointError` should not tolerate them.
"""


class CheckpointError(Exception):
    """Base of every error of this package."""


class CheckpointNotFoundError(CheckpointError):
    """The step asked for is not committed, or nothing is."""


class CorruptCheckpointError(CheckpointError):
    """A committed step is damaged, or written in a form this version does not read."""


class CheckpointMismatchError(CheckpointError):
    """A step does not hold what it is asked for: a name, a shape, a type, values of as many ranks."""


class CheckpointWriteError(CheckpointError):
    """A save failed, or was refused because its step is there already; what was committed before is intact."""


class LostRankError(CheckpointError):
    """A rank of the group died or did not answer in time. The group can no longer save or load."""


class CheckpointLockedError(CheckpointError):
    """Another writer holds the lock of this path."""


class MissingExtraError(CheckpointError, ImportError):
    """An optional dependency is not installed; the message holds the install command."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(f"{module!r} is not installed: pip install 'gcore-ckpt[{extra}]'")
