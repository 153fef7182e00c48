"""Where a program leaves what happened."""

from typing import Any, Protocol, TypeVar

from gcore_controller import Span

EvaluationT_contra = TypeVar("EvaluationT_contra", contravariant=True)


class Recorder(Protocol[EvaluationT_contra]):
    """Where rank 0 leaves what happened."""

    async def evaluated(self, step: int, evaluation: EvaluationT_contra) -> None: ...

    async def updating(self) -> None:
        """From here to `reached`, the models are between two steps."""
        ...

    async def stepped(
        self, step: int, metrics: dict[str, float], spans: list[list[Span]], devices: dict[str, list[Span]]
    ) -> None:
        """A step's metrics, and where its time went: on each controller, by rank, and on each device, by name."""
        ...

    async def reached(self, step: int, controllers: list[dict[str, Any]]) -> None:
        """All controllers are at the end of ``step`` with these states; the place to take a checkpoint."""
        ...
