"""What gcore sets out to be beside verl, and whether the figures bear it out."""

from collections.abc import Sequence
from dataclasses import dataclass

from gcore_bench.grpo.summary import Line

_SPEED = {"gcore": 20.0, "gcore-ray": 5.0}
"""Steps of ours in one of verl's, at least."""
_MEMORY = 1 / 3
"""Of verl's peak, at most."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """One contender of ours beside verl."""

    contender: str
    speed: float
    """Steps of ours in one of verl's."""
    least_speed: float
    memory: float
    """Our peak over verl's."""
    most_memory: float = _MEMORY

    def __str__(self) -> str:
        return (
            f"{self.contender} / verl: {self.speed:.1f}x the speed (aim: at least {self.least_speed:.0f}x, "
            f"{_met(self.speed >= self.least_speed)}), {self.memory:.2f} of the memory "
            f"(aim: at most {self.most_memory:.2f}, {_met(self.memory <= self.most_memory)})"
        )


def aims(lines: Sequence[Line]) -> list[Aim]:
    """Of each contender of ours that has one, where verl ran."""
    by_name = {line.contender: line for line in lines}
    verl = by_name.get("verl")
    if verl is None:
        return []
    return [
        Aim(
            contender=name,
            speed=verl.step_s / by_name[name].step_s,
            least_speed=least_speed,
            memory=by_name[name].peak_pss_bytes / verl.peak_pss_bytes,
        )
        for name, least_speed in _SPEED.items()
        if name in by_name
    ]


def _met(is_met: bool) -> str:
    return "met" if is_met else "not met"
