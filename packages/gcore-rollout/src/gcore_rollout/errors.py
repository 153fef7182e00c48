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
