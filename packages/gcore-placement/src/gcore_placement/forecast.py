"""Predict the seconds of a step by stage, from a job's costs, a strategy and a partition; and correct the predictions
by measurements: one robust and bounded factor for each kind of work."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, Self, TypeVar, cast, get_args

import numpy as np
from numpy.typing import NDArray

from gcore_placement.costs import EngineCosts, EngineLaws, JobCosts, SwapCosts, TrainingCosts, TrainingLaws
from gcore_placement.errors import PlacementError, check_above_0, check_positive, refusal
from gcore_placement.strategies import PLANNED, STRATEGIES, Strategy
from gcore_placement.workload.job import Job, Lengths

RUN_FILE = "placement.json"
"""A file in a run's folder, whose key `correction` holds `Correction.state()`."""

Stage = Literal["generation", "reward", "preparation", "training", "weight_sync", "swap"]
STAGES: tuple[Stage, ...] = get_args(Stage)

Engine = TypeVar("Engine", EngineCosts, EngineLaws)
Training = TypeVar("Training", TrainingCosts, TrainingLaws)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step by stage, one after the other."""

    generation_s: float
    reward_s: float
    """Seconds after generation, where both co-exist."""
    swap_s: float
    """Seconds in which engines sleep and wake."""
    preparation_s: float
    training_s: float
    weight_sync_s: float

    @property
    def total_s(self) -> float:
        return sum(vars(self).values())


def predict_step(
    costs: JobCosts, job: Job, *, strategy: Strategy, num_devices: int, policy_devices: int, reward_devices: int
) -> StepTime:
    """Predict the mean time of a step.

    Colocated: each wave of sampling wakes the policy, generates, swaps it for the judge, and rewards. Split and
    dynamic: both run at the same time, a wave takes as long as the slower one, and the last response is judged after
    that; one sleep and one wake-up a step free memory for training. A dynamic partition is taken where it settles.

    Args:
        costs: of the policy's engine, the judge's, and training.
        num_devices: all devices; they train together.
        policy_devices: devices that generate; all in colocated.
        reward_devices: devices of the judge; all in colocated, 0 without a judge.

    Raises:
        PlacementError: the strategy is not planned, or devices do not hold one replica.
    """
    check_planned(strategy)

    def replicas(role: str, devices: int, engine: EngineCosts) -> NDArray[np.float64]:
        least = engine.devices_per_replica
        if not least <= devices <= num_devices:
            raise refusal(f"{role}_devices", devices, f"at least a replica ({least}), at most all ({num_devices})")
        return np.array([devices // least], dtype=np.float64)

    generation = generation_seconds(costs.policy, job, replicas("policy", policy_devices, costs.policy))
    reward = np.zeros_like(generation)
    if costs.reward is not None:
        judging = reward_seconds(costs.reward, job, replicas("reward", reward_devices, costs.reward))
        last_s = last_judgement_s(costs.reward, job)
        reward = added_by_reward(generation, judging, strategy=strategy, last_s=last_s)
    preparation_s, training_s = training_seconds(costs.training, job.training_tokens, job.training_pairs, num_devices)
    return StepTime(
        generation_s=float(job.wave_chances @ generation[:, 0]),
        reward_s=float(job.wave_chances @ reward[:, 0]),
        swap_s=num_swaps(job, strategy=strategy) * (costs.swap.sleep_s + costs.swap.wake_s),
        preparation_s=preparation_s,
        training_s=training_s,
        weight_sync_s=costs.training.sync_s,
    )


def check_planned(strategy: Strategy) -> None:
    """Raise PlacementError unless the strategy is one that plans choose among."""
    if strategy not in PLANNED:
        raise refusal("strategy", strategy, f"one of {', '.join(PLANNED)}")


def added_by_reward(
    generation: NDArray[np.float64], judging: NDArray[np.float64], *, strategy: Strategy, last_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the seconds by which judging makes each wave longer than its generation: [num_waves, ...]."""
    if STRATEGIES[strategy].is_time_shared:
        return judging
    return np.maximum(judging - generation, 0.0) + last_s


def num_swaps(job: Job, *, strategy: Strategy) -> float:
    """Return the mean number of times that engines sleep and wake in a step."""
    takes_turns = job.judge is not None and STRATEGIES[strategy].is_time_shared
    return 2 * float(job.wave_chances.sum()) if takes_turns else 1.0


def training_seconds(costs: TrainingCosts, tokens: float, pairs: float, num_devices: int) -> tuple[float, float]:
    """Return the seconds of preparation and of training for a step of T tokens and A attended pairs.

    Training takes, on each of D devices whose work is even, base_s + (per_token_s * T + per_pair_s * A) / D, and a pass
    that only scores takes `forward_share` of the second term.
    """
    pass_s = (costs.per_token_s * tokens + costs.per_pair_s * pairs) / num_devices
    return costs.num_forward_passes * costs.forward_share * pass_s, costs.base_s + pass_s


def generation_seconds(
    engine: EngineCosts | EngineLaws, job: Job, num_replicas: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the seconds of each wave on each number of replicas, a prompt read once: [num_waves, num_replicas]."""
    return _waves_seconds(engine, job, num_replicas, job.prompt_lengths.mean, job.response_lengths, num_reads=1)


def reward_seconds(
    engine: EngineCosts | EngineLaws, job: Job, num_replicas: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the seconds of judging each wave on each number of replicas: [num_waves, num_replicas]."""
    read, written = _judge_lengths(job)
    return _waves_seconds(engine, job, num_replicas, read.mean, written, num_reads=job.n)


def last_judgement_s(engine: EngineCosts | EngineLaws, job: Job) -> NDArray[np.float64]:
    """Return the seconds of the last judgement, which nothing hides, of a response read and judged alone."""
    read, written = _judge_lengths(job)
    return np.asarray(engine.prefill_per_token_s * read.longest + engine.decode_base_s * written.mean)


def _waves_seconds(
    engine: EngineCosts | EngineLaws,
    job: Job,
    num_replicas: NDArray[np.float64],
    prompt_mean: float,
    lengths: Lengths,
    *,
    num_reads: int,
) -> NDArray[np.float64]:
    """Sum the law of `EngineCosts` over the decoding steps of the replica with the longest sequence, for each wave.

    Each sequence adds its share to as many steps as it has tokens. There are as many steps as the longest has tokens;
    or, where sequences wait, as many as pass until the last has started and all that then run have ended.
    """
    context_tokens = prompt_mean * lengths.mean + (lengths.mean_square + lengths.mean) / 2
    rows: list[NDArray[np.float64]] = []
    for prompts in job.wave_prompts.tolist():
        num_sequences, read_tokens = prompts * job.n, prompts * num_reads * prompt_mean
        each = np.maximum(num_sequences / num_replicas, min(1.0, num_sequences))
        steps = np.full(each.shape, lengths.expected_longest(num_sequences))
        waiting = each > engine.max_num_seqs
        if waiting.any():
            left = lengths.remaining()
            # Where some laws make sequences wait, all are for the most sequences that memory holds.
            most = float(np.max(engine.max_num_seqs))
            last_begins = each * lengths.mean / engine.max_num_seqs - left.mean
            drained = last_begins + left.expected_longest(most)
            steps = np.where(waiting, np.maximum(steps, drained), steps)
        rows.append(
            engine.decode_base_s * steps
            + engine.decode_per_sequence_s * each * lengths.mean
            + engine.decode_per_context_token_s * each * context_tokens
            + engine.prefill_per_token_s * each * (read_tokens / num_sequences)
        )
    return np.stack(rows)


def _judge_lengths(job: Job) -> tuple[Lengths, Lengths]:
    if job.judge_prompt_lengths is None or job.judge_lengths is None:
        raise PlacementError("job.judge is None; expected a model where costs.reward is given")
    return job.judge_prompt_lengths, job.judge_lengths


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
        self._half_life, self._window, self._min_count, self._most = half_life, window, min_count, most
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
        """Observe the measured seconds of a kind of work, and those that the uncorrected model predicts for it.

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
        """Return measured over predicted seconds of a stage. Raises PlacementError if the stage is not known."""
        _check_stage(stage)
        ratios = np.array(self._ratios[stage])
        if len(ratios) < self._min_count:
            return 1.0
        # The weighted median: the least ratio at and below which half of the weight lies.
        order = np.argsort(ratios, kind="stable")
        cumulated = np.cumsum((0.5 ** (np.arange(len(ratios))[::-1] / self._half_life))[order])
        median = ratios[order][np.searchsorted(cumulated, cumulated[-1] / 2)]
        return float(np.clip(median, 1 / self._most, self._most))

    def corrected(self, costs: JobCosts) -> JobCosts:
        """Return the costs with each stage's seconds times its factor."""
        return JobCosts(
            policy=self.engine("generation", costs.policy),
            reward=None if costs.reward is None else self.engine("reward", costs.reward),
            training=_times(self.training(costs.training), self.factor("weight_sync"), "sync_s"),
            swap=self.swap(costs.swap),
        )

    def engine(self, stage: Literal["generation", "reward"], costs: Engine) -> Engine:
        """Return an engine's law, or laws of many, times the stage's factor."""
        names = ("decode_base_s", "decode_per_sequence_s", "decode_per_context_token_s", "prefill_per_token_s")
        return _times(costs, self.factor(stage), *names)

    def training(self, costs: Training) -> Training:
        """Return the laws of training and preparation times their factors; not weight synchronisation."""
        training, preparation = self.factor("training"), self.factor("preparation")
        scaled = _times(costs, training, "base_s", "per_token_s", "per_pair_s")
        return _times(scaled, preparation / training, "forward_share")

    def swap(self, costs: SwapCosts) -> SwapCosts:
        """Return the seconds of a swap times their factor."""
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


_MEASURED: Mapping[Stage, str] = {
    "generation": "timing_s/gen",
    "reward": "timing_s/reward",
    "preparation": "timing_s/prepare",
    "training": "timing_s/train",
    "weight_sync": "timing_s/sync",
}


class Forecast:
    """Predicts each step of a run of gcore-llm from its sampled lengths, and corrects the laws by the measured seconds.

    Args:
        predict: `predict_step` for the run's costs and devices.
        job: of the run, at its full size.
        correction: of the laws; steps that are observed change it.
        save: writes `placement.json` after each step: it calls its argument with the path to write to.
    """

    def __init__(
        self,
        predict: Callable[[Job], StepTime],
        job: Job,
        correction: Correction,
        save: Callable[[Callable[[Path], object]], object],
    ) -> None:
        self._predict, self._job, self._correction, self._save = predict, job, correction, save

    def stepped(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Observe a step; return its predicted seconds, and their error as a share of the measured ones."""
        if not metrics.get("sampling/groups") or "response_length/mean" not in metrics:
            return {}
        groups = metrics["sampling/groups"]
        job = replace(
            self._job,
            prompt_lengths=Lengths.recorded([max(1.0, metrics["prompt_length/mean"])]),
            response_lengths=lengths_of(
                metrics["response_length/mean"], metrics["response_length/max"], count=groups * self._job.n
            ),
            train_batch_size=round(groups),
            acceptance=min(1.0, max(metrics["sampling/acceptance"], 1e-3)),
        )
        law, predicted_s, measured_s = self._predict(job), 0.0, 0.0
        for stage, name in _MEASURED.items():
            law_s, took_s = getattr(law, f"{stage}_s"), metrics.get(name, 0.0)
            if law_s > 0 and took_s > 0:
                predicted_s += law_s * self._correction.factor(stage)
                measured_s += took_s
                self._correction.observe(stage, predicted_s=law_s, measured_s=took_s)
        state = json.dumps({"correction": self._correction.state()})
        self._save(lambda path: path.write_text(state))
        return {"forecast/stages_s": predicted_s, "forecast/error": predicted_s / measured_s - 1} if measured_s else {}


def lengths_of(mean: float, longest: float, *, count: float) -> Lengths:
    """Return log-normal lengths of this mean; the longest of `count` of them is about `longest`."""
    mean, longest = max(1.0, mean), max(1.0, longest)
    deviations = NormalDist().inv_cdf(1 - 1 / (count + 1)) if count > 1 else 0.0
    # ln(longest / mean) = sigma * deviations - sigma^2 / 2
    sigma = deviations - math.sqrt(max(0.0, deviations**2 - 2 * math.log(max(1.0, longest / mean))))
    return Lengths.log_normal(median=min(mean * math.exp(-(sigma**2) / 2), longest), sigma=sigma, longest=longest)
