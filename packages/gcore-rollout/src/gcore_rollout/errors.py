"""The errors of this package."""

from collections.abc import Collection


class RolloutError(Exception):
    """Base of this package's errors."""


class RequestError(RolloutError, ValueError):
    """A request cannot be served: its prompt is empty or too long, or a limit is out of range."""


class EngineModelError(RolloutError, ValueError):
    """The engine cannot run this model's architecture."""


class RewardError(RolloutError):
    """A reward function failed, or returned something that is not one finite number."""


class RewardConfigError(RewardError, ValueError):
    """A reward was given a setting that it cannot work with."""


def require(
    field: str,
    value: object,
    holds: bool,
    accepted: str,
    error: type[Exception] = RewardConfigError,
) -> None:
    """Raise an error unless what a setting has to be holds."""
    if not holds:
        raise error(f"{field} is {value!r}; expected {accepted}")


def require_one_of(name: str, value: str, accepted: Collection[str]) -> None:
    """Raise `RewardConfigError` unless a setting is one of these."""
    require(name, value, value in accepted, f"one of {', '.join(accepted)}")


class RewardExitError(RewardError):
    """A reward tried to end the process, or blocked it in its trial call; ``on_error`` does not apply."""


class NoScoreError(RewardError):
    """A reward has no score for a completion, so that the group of the completion must be dropped."""


class NotApplicableError(NoScoreError):
    """A reward does not apply to a prompt: in a sum of rewards it adds nothing; alone it has no score."""


class EngineStartError(RolloutError):
    """An engine process was not ready in time."""


class EngineDiedError(RolloutError):
    """An engine has ended permanently: its process ended, or hung and was killed.

    ``unfinished`` are the unfinished samples of the call that raises this, as (request id, index).
    """

    def __init__(self, reason: str, *, unfinished: tuple[tuple[str, int], ...] = ()) -> None:
        message = reason
        if unfinished:
            message += f"; unfinished samples: {len(unfinished)}"
        super().__init__(message)
        self.reason = reason
        self.unfinished = unfinished


class EpisodeError(RolloutError):
    """An episode failed: its environment or agent did, was too slow, or sent messages that cannot be answered."""


class ServerRequestError(RolloutError):
    """A server refused a request, or failed at it, with an HTTP ``status`` of 400 or above."""

    def __init__(self, request: str, *, status: int, answer: str) -> None:
        super().__init__(f"{request}: the server says {status}: {answer[:500]}")
        self.status = status


class WrongWeightsError(RolloutError):
    """An engine computes with other weights than the trainer's, so that its samples are useless.

    ``tensors`` are the names of those that differ; none if the engine reports another version.
    """

    def __init__(self, message: str, *, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tensors = tensors


class _MissingExtraError(RolloutError, ImportError):
    """Also an ImportError, without which a process that imports modules before their use ends."""


def make_extra_error(module: str, extra: str) -> RolloutError:
    """Return the error for an optional dependency that is not installed, with the install command."""
    return _MissingExtraError(f"{module!r} is not installed: pip install 'gcore-rollout[{extra}]'")
