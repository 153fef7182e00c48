"""What a process is told, and what it hands back."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a process is to do."""

    part: str
    contender: str
    """A library, or a limit."""
    root: str
    """The folder of this contender's files."""
    size_bytes: int
    tensors: int
    threads: int
    """Of torch in this process."""
    phase: str = "save"
    """load: what other ranks have saved."""
    rank: int = 0
    world_size: int = 1
    store: str = ""
    """The file over which ranks find each other."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one process, or of all ranks together."""

    rows: dict[str, dict[str, float]]
    """Seconds by metric, for each way of doing it: a limit has several, a library one of its own name."""
    before_bytes: int | None = None
    """Resident memory with the state made and nothing saved; what processes share is shared out among them."""
    saving_s: tuple[float, float] | None = None
    """From the first save to the end of the last, on the monotonic clock that all processes share."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One contender in one round."""

    contender: str
    round: int
    load: float
    """Runnable processes on the machine, averaged over the minute before the run."""
    rows: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    peak_extra_bytes: int | None = None
    """Highest resident memory of all processes together during the saves, over that with the state made."""
    failure: str = ""
