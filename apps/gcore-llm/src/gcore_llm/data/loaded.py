"""The prompts of one file, and what is known of their lengths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gcore_rollout import Prompt

Progress = Callable[[str, int, int], None]
"""Called with the name of long work, and with how much of how much of it is done."""


def no_progress(name: str, done: int, total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True, kw_only=True)
class LoadedPrompts:
    """The prompts of one file that have at most data.max_prompt_length tokens."""

    prompts: Sequence[Prompt]
    """A list, or of a large file `LargePrompts`."""
    num_too_long: int
    """Number of the others."""
    longest: int
    """Tokens of the longest prompt that was kept."""
    shortest: int
    """Tokens of the shortest one of all."""
