"""Retention: the steps that are kept."""

from dataclasses import dataclass

from gcore_ckpt.storage.base import Storage


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Steps to keep after a commit.

    Attributes:
        keep: How many of the latest; None keeps all.
        keep_every: Steps that are multiples of this stay for good, next to the latest; None for no such steps.

    Raises:
        ValueError: A number is below 1.
    """

    keep: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep is {self.keep}; expected None (keep all steps) or 1 or more")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every is {self.keep_every}; expected None or 1 or more")
        if self.keep_every is not None and self.keep is None:
            raise ValueError(
                f"keep_every is {self.keep_every} and keep is None, which keeps all steps; expected a keep"
            )

    def superfluous(self, steps: list[int], committed: int | None = None) -> list[int]:
        """Return those of `steps` (ascending) that may go, never the one just committed."""
        if self.keep is None:
            return []
        others = [step for step in steps if step != committed]
        kept = self.keep - (0 if committed is None else 1)
        lowest = others[: max(0, len(others) - kept)]
        return [step for step in lowest if self.keep_every is None or step % self.keep_every != 0]

    def apply(self, storage: Storage, committed: int | None = None) -> list[int]:
        """Delete the superfluous steps and return them.

        Raises:
            OSError: One could not be deleted.
        """
        steps = self.superfluous(storage.steps(), committed)
        for step in steps:
            storage.remove(step)
        return steps
