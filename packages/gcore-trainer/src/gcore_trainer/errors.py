"""The errors of this package."""


class TrainerError(Exception):
    """Base of this package's errors."""


class ConfigError(TrainerError, ValueError):
    """A setting has a value that is not accepted."""


class BatchError(TrainerError, ValueError):
    """A batch that cannot be trained on: mismatched shapes, nothing to learn from, a sequence too long."""


class UnsupportedModelError(TrainerError, ValueError):
    """The backend cannot run this model's architecture."""


class MissingExtraError(TrainerError, ImportError):
    """An optional dependency is not installed; the message holds the install command, and the setting that needs it."""

    def __init__(self, module: str, extra: str, setting: str = "") -> None:
        needed = f"{setting}, and " if setting else ""
        super().__init__(
            f"{needed}{module!r} is not installed: pip install 'gcore-trainer[{extra}]'"
        )


class StateError(TrainerError, ValueError):
    """A saved state does not fit this trainer."""
