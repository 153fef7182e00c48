"""Which steps stay on disk."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Steps to keep after a commit: `keep` of the latest (None for all), and multiples of `keep_every` for good."""

    keep: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep is {self.keep}; expected None (keep all steps) or 1 or more")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every is {self.keep_every}; expected None or 1 or more")
        if self.keep_every is not None and self.keep is None:
            found = f"keep_every is {self.keep_every} and keep is None"
            raise ValueError(f"{found}, which keeps all steps; expected a keep")

    def superfluous(self, steps: list[int], committed: int | None = None) -> list[int]:
        """Return those of `steps` (ascending) that may go, never the one just committed."""
        if self.keep is None:
            return []
        others = [step for step in steps if step != committed]
        kept = self.keep - (0 if committed is None else 1)
        lowest = others[: max(0, len(others) - kept)]
        return [step for step in lowest if self.keep_every is None or step % self.keep_every != 0]
