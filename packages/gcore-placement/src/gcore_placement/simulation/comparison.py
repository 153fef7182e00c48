"""A comparison of all strategies on one trace."""

from dataclasses import dataclass

from gcore_placement.simulation.simulator import Simulator, StrategyRun


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The runs of all strategies on one trace."""

    name: str
    num_devices: int
    colocated: StrategyRun
    best_split: StrategyRun
    dynamic: StrategyRun
    clairvoyant: StrategyRun

    @property
    def runs(self) -> tuple[StrategyRun, StrategyRun, StrategyRun, StrategyRun]:
        return self.colocated, self.best_split, self.dynamic, self.clairvoyant


def compare(name: str, simulator: Simulator) -> Comparison:
    """Simulate the trace of a simulator under all strategies."""
    return Comparison(
        name=name,
        num_devices=simulator.space.num_devices,
        colocated=simulator.colocated(),
        clairvoyant=simulator.clairvoyant(),
        best_split=simulator.best_split(),
        dynamic=simulator.dynamic(),
    )
