"""The prompts of one file, and what is known of their lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

from gcore_rollout import Prompt


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
