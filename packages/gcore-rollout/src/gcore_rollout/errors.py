"""Everything this package raises on purpose."""


class RolloutError(Exception):
    """Base of this package's errors."""


class MissingExtraError(RolloutError, ImportError):
    """An optional dependency is not installed; the message holds the install command."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(f"{module!r} is not installed: pip install 'gcore-rollout[{extra}]'")


class RequestError(RolloutError, ValueError):
    """A request that no engine could serve: empty or too long a prompt, a bad limit."""


class UnsupportedModelError(RolloutError, ValueError):
    """The engine cannot run this model's architecture."""


class RewardError(RolloutError):
    """A reward function failed, or returned something that is not one finite number."""


class RewardConfigError(RewardError, ValueError):
    """A reward was given a setting that it cannot work with."""


class RewardExitError(RewardError):
    """A reward tried to end the process, or blocked it in its trial call; ``on_error`` does not apply."""


class NoScoreError(RewardError):
    """A reward says that it has no score for a completion, so that the group it belongs to is to be dropped."""


class SandboxError(RolloutError):
    """A sandbox cannot be made, or could not start a program; never what a program itself did."""


class EngineStartError(RolloutError):
    """An engine process was not ready in time."""


class EngineDiedError(RolloutError):
    """An engine is gone for good: its process ended, or hung and was killed.

    Attributes:
        unfinished: The samples, as (request id, index), that the call which raises this still owed.
    """

    def __init__(self, reason: str, *, unfinished: tuple[tuple[str, int], ...] = ()) -> None:
        super().__init__(f"{reason}; unfinished samples: {len(unfinished)}" if unfinished else reason)
        self.reason = reason
        self.unfinished = unfinished


class EpisodeError(RolloutError):
    """An environment failed, or did not answer in time."""


class ServerRequestError(RolloutError):
    """A server refused a request, or failed at it.

    Attributes:
        status: What it answered with, 400 or above.
    """

    def __init__(self, request: str, *, status: int, answer: str) -> None:
        super().__init__(f"{request}: the server says {status}: {answer[:500]}")
        self.status = status


class WrongWeightsError(RolloutError):
    """An engine computes with other weights than the trainer's, so that its samples are of no use.

    Attributes:
        tensors: Names of the tensors that differ; none if the engine reports another version.
    """

    def __init__(self, message: str, *, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tensors = tensors


class WeightSyncError(RolloutError):
    """New weights could not be sent, received or applied."""


class WrongBaseError(WeightSyncError):
    """An update changes weights that are not those which are there: a full one is needed.

    Attributes:
        version: Of the weights that are there; None: there are none, or only what was merged from adapters.
    """

    def __init__(self, message: str, *, version: int | None) -> None:
        super().__init__(message)
        self.version = version


class CorruptWeightsError(WeightSyncError):
    """What was stored is not what was written."""


class PeerLostError(WeightSyncError):
    """Another rank is gone, or did not do its part in time; the process group is of no more use."""
