"""The correction of a cost model by measurements: one robust and bounded factor for each kind of work."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast, get_args

import numpy as np

from gcore_placement.costs import EngineCosts, JobCosts, SwapCosts, TrainingCosts
from gcore_placement.errors import PlacementError, check_above_0, check_positive, refusal

if TYPE_CHECKING:
    from gcore_placement.planning.engine_costs import EngineLaws
    from gcore_placement.planning.training_costs import TrainingLaws

RUN_FILE = "placement.json"
"""A file in a run's folder, whose key `correction` holds `Correction.state()`."""

Stage = Literal["generation", "reward", "preparation", "training", "weight_sync", "swap"]
STAGES: tuple[Stage, ...] = get_args(Stage)

Engine = TypeVar("Engine", EngineCosts, "EngineLaws")
Training = TypeVar("Training", TrainingCosts, "TrainingLaws")


class Correction:
    """Factors by which measured seconds exceed predicted ones, stage by stage.

    A factor is the weighted median of the last ratios of measured to predicted seconds; a ratio's weight halves every
    `half_life` further ones. So it follows a change within about `half_life` observations, and no single one, however
    wild, moves it beyond its neighbours. Until there are `min_count` ratios of a stage, its factor is 1.

    Args:
        half_life: observations after which one counts half.
        window: observations that are kept.
        min_count: observations without which nothing is corrected.
        most: factors stay between 1 / most and most.

    Raises:
        PlacementError: an argument is out of bounds.
    """

    def __init__(self, *, half_life: float = 8.0, window: int = 64, min_count: int = 3, most: float = 16.0) -> None:
        check_above_0("half_life", half_life)
        check_positive("window", window)
        check_positive("min_count", min_count)
        if min_count > window:
            raise refusal("min_count", min_count, f"at most window ({window})")
        if not 1 <= most < np.inf:
            raise refusal("most", most, "a finite number of at least 1")
        self._half_life = half_life
        self._window = window
        self._min_count = min_count
        self._most = most
        self._ratios: dict[Stage, list[float]] = {stage: [] for stage in STAGES}

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load the correction of a run: its folder, its `placement.json`, or a file with `state()` alone.

        Raises:
            PlacementError: the file does not exist, or holds no such state.
        """
        file = Path(path) / RUN_FILE if Path(path).is_dir() else Path(path)
        try:
            kept: Any = json.loads(file.read_text())
        except FileNotFoundError:
            raise refusal("correction", str(file), f"a run's folder with {RUN_FILE}, or such a file") from None
        except ValueError as error:
            raise PlacementError(f"{file} is not JSON; expected the state of a Correction ({error})") from None
        state: Any = cast("dict[str, Any]", kept).get("correction", kept) if isinstance(kept, dict) else kept
        if not isinstance(state, dict):
            raise PlacementError(f"{file} is a JSON {type(state).__name__}; expected an object")
        found = cls()
        try:
            found.load_state(cast("dict[str, Any]", state))
        except PlacementError as error:
            raise PlacementError(f"{file}: {error}") from None
        return found

    def observe(self, stage: Stage, *, predicted_s: float, measured_s: float) -> None:
        """Observe one measured span.

        Args:
            stage: kind of work.
            predicted_s: seconds of this work by the uncorrected model.
            measured_s: measured seconds.

        Raises:
            PlacementError: the stage is not known, or seconds are not finite and above 0.
        """
        _check_stage(stage)
        check_above_0("predicted_s", predicted_s)
        check_above_0("measured_s", measured_s)
        ratios = self._ratios[stage]
        ratios.append(measured_s / predicted_s)
        del ratios[: -self._window]

    def factor(self, stage: Stage) -> float:
        """Return measured over predicted seconds of a stage.

        Raises:
            PlacementError: the stage is not known.
        """
        _check_stage(stage)
        ratios = self._ratios[stage]
        if len(ratios) < self._min_count:
            return 1.0
        weights = 0.5 ** (np.arange(len(ratios))[::-1] / self._half_life)
        return float(np.clip(_weighted_median(np.array(ratios), weights), 1 / self._most, self._most))

    def corrected(self, costs: JobCosts) -> JobCosts:
        """The costs with each stage's seconds times its factor."""
        training = self.training(costs.training)
        return JobCosts(
            policy=self.engine("generation", costs.policy),
            reward=None if costs.reward is None else self.engine("reward", costs.reward),
            training=replace(training, sync_s=training.sync_s * self.factor("weight_sync")),
            swap=self.swap(costs.swap),
        )

    def engine(self, stage: Literal["generation", "reward"], costs: Engine) -> Engine:
        """An engine's law, or laws of many, times the stage's factor."""
        names = ("decode_base_s", "decode_per_sequence_s", "decode_per_context_token_s", "prefill_per_token_s")
        return _times(costs, self.factor(stage), *names)

    def training(self, costs: Training) -> Training:
        """The law of training and preparation, or laws of many, times their factors; not weight synchronisation."""
        training, preparation = self.factor("training"), self.factor("preparation")
        scaled = _times(costs, training, "base_s", "per_token_s", "per_pair_s")
        return _times(scaled, preparation / training, "forward_share")

    def swap(self, costs: SwapCosts) -> SwapCosts:
        """Its seconds times their factor."""
        return _times(costs, self.factor("swap"), "sleep_s", "wake_s", "load_s")

    def state(self) -> dict[str, Any]:
        """Return the state for `load_state`, as plain data for JSON."""
        return {"ratios": {stage: list(ratios) for stage, ratios in self._ratios.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the ratios of a state; this object's settings stay.

        Raises:
            PlacementError: it is not such a state; nothing is changed then.
        """
        ratios: Any = state.get("ratios")
        if not isinstance(ratios, Mapping) or set(cast("Mapping[str, Any]", ratios)) != set(STAGES):
            raise refusal("state", state, f"of Correction.state(): ratios of {', '.join(STAGES)}")
        found: dict[Stage, list[float]] = {}
        for stage in STAGES:
            if not isinstance(ratios[stage], list):
                raise refusal(f"ratios.{stage}", ratios[stage], "a list")
            for ratio in ratios[stage]:
                check_above_0(f"ratios.{stage}", ratio)
            found[stage] = [float(ratio) for ratio in ratios[stage]][-self._window :]
        self._ratios = found


def _times(costs: Any, factor: float, *names: str) -> Any:
    return replace(costs, **{name: getattr(costs, name) * factor for name in names})


def _check_stage(stage: str) -> None:
    if stage not in STAGES:
        raise refusal("stage", stage, f"one of {', '.join(STAGES)}")


def _weighted_median(
    values: np.ndarray[Any, np.dtype[np.float64]], weights: np.ndarray[Any, np.dtype[np.float64]]
) -> float:
    """Return the least value at and below which half of the weight lies."""
    order = np.argsort(values, kind="stable")
    cumulated = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(cumulated, cumulated[-1] / 2)])
