"""The errors of this package."""


class TrainerError(Exception):
    """Base of this package's errors."""


class ConfigError(TrainerError, ValueError):
    """A setting has a value that is not accepted."""


class BatchError(TrainerError, ValueError):
    """A batch that cannot be trained on: mismatched shapes, nothing to learn from, a sequence too long."""


class UnsupportedModelError(TrainerError, ValueError):
    """The backend cannot run this model's architecture."""


class StateError(TrainerError, ValueError):
    """A saved state does not fit this trainer."""


class _MissingExtraError(TrainerError, ImportError):
    """Also an ImportError, without which a process that imports modules before their use ends."""


def make_extra_error(module: str, extra: str, setting: str = "") -> TrainerError:
    """Return the error for an optional dependency that is not installed, with the install command and the setting."""
    needed = f"{setting}, and " if setting else ""
    return _MissingExtraError(
        f"{needed}{module!r} is not installed: pip install 'gcore-trainer[{extra}]'"
    )
