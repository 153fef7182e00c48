"""A step of an RLHF job: its work, its predicted seconds by stage, and their correction by measurements."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

import numpy as np

from gcore_placement.costs import (
    EngineCosts,
    EngineLaws,
    JobCosts,
    TrainingCosts,
    TrainingLaws,
    times,
)
from gcore_placement.errors import PlacementError, read_json, refusal
from gcore_placement.quantities import (
    Above0,
    Amount,
    CheckedQuantities,
    Floats,
    Lengths,
    Positive,
    Share,
    check_above_0,
    check_known,
    lengths_of,
)
from gcore_placement.strategies import PLANNED, STRATEGIES, Strategy
from gcore_placement.workload.model_shape import ModelShape

RUN_FILE = "placement.json"
"""A file in a run's folder; its key `correction` holds `Correction.state()`."""

Stage = Literal["generation", "reward", "preparation", "training", "weight_sync", "swap"]
STAGES: tuple[Stage, ...] = get_args(Stage)
EngineStage = Literal["generation", "reward"]

Training = TypeVar("Training", TrainingCosts, TrainingLaws)


@dataclass(frozen=True, kw_only=True, eq=False)
class Job(CheckedQuantities):
    """The mean work of a step. Raises PlacementError where a number is out of its bounds, or a judge has no lengths.

    Example:
        >>> policy = ModelShape.from_config(json.loads(Path("model/config.json").read_text()))
        >>> lengths = Lengths.recorded([600, 1000])
        >>> job = Job(policy=policy, prompt_lengths=Lengths.recorded([200]), response_lengths=lengths,
        ...     train_batch_size=32, n=8, ppo_mini_batch_size=8)
        >>> job.training_tokens
        211200.0
        >>> job.num_updates
        4
    """

    policy: ModelShape
    prompt_lengths: Lengths
    response_lengths: Lengths
    train_batch_size: Positive
    """Prompts that a step trains on."""
    n: Positive
    """Responses to each."""
    acceptance: Share = 1.0
    """Share of prompts whose responses do not all score alike; the others are sampled again (dynamic sampling)."""
    judge: ModelShape | None = None
    """A generative reward model, which reads the mean prompt and the response and writes a judgement; None: scores
    take no time."""
    judge_lengths: Lengths | None = None
    """Lengths of judgements."""
    reference: bool = False
    """A frozen copy of the policy scores all responses (KL)."""
    teachers: Sequence[ModelShape] = ()
    """Frozen models that score all responses (on-policy distillation)."""
    critic: ModelShape | None = None
    """A value model that is trained as the policy is."""
    compute_bytes: Positive = 2
    """Bytes of a number in matrix products, activations, keys and values, and engine weights: 2 is bfloat16. Trained
    parameters, gradients and moments are float32."""
    old_log_probs: bool = False
    """The policy scores all responses again before it trains; else the engine's log-probs serve."""
    ppo_mini_batch_size: Amount = 0
    """Prompts of an update; 0: all prompts of the step are one update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.judge is None) != (self.judge_lengths is None):
            raise refusal("judge_lengths", self.judge_lengths, "given with a judge, and only then")

    @property
    def trained_models(self) -> list[ModelShape]:
        """The policy, and the critic where there is one."""
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    @property
    def num_updates(self) -> int:
        """Updates of a step. Each has micro-batches of its own, and an exchange of gradients at its end."""
        return int(
            np.ceil(self.train_batch_size / (self.ppo_mini_batch_size or self.train_batch_size))
        )

    @property
    def num_forward_passes(self) -> float:
        """Scoring passes in preparation; a teacher's pass counts as its FLOPs over the policy's."""
        teacher_flops = sum(teacher.workload.flops_per_token for teacher in self.teachers)
        num_passes = int(self.reference) + int(self.old_log_probs) + int(self.critic is not None)
        return num_passes + teacher_flops / self.policy.workload.flops_per_token

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and the longest response together."""
        return int(np.ceil(self.prompt_lengths.longest + self.response_lengths.longest))

    @cached_property
    def wave_prompts(self) -> Floats:
        """Prompts of each wave of sampling, [num_waves].

        The first wave is sized by the acceptance rate. Where that is below 1, it falls short as often as not, by about
        the standard deviation of how many are accepted, and a second wave makes up for it.
        """
        total = self.train_batch_size / self.acceptance
        short = min(
            float(np.sqrt(self.train_batch_size * (1 - self.acceptance))) / self.acceptance, total
        )
        return np.array([total - short / 2, short] if short else [total])

    @cached_property
    def wave_chances(self) -> Floats:
        """Share of the steps that have the wave, [num_waves]."""
        return np.array([1.0, 0.5])[: self.wave_prompts.size]

    @cached_property
    def training_tokens(self) -> float:
        """Tokens that a step trains on, a group's prompt computed once."""
        return self.train_batch_size * (
            self.prompt_lengths.mean + self.n * self.response_lengths.mean
        )

    @cached_property
    def training_pairs(self) -> float:
        """Pairs of a query token and a key token it attends to; see `TransformerWorkload.group_flops`."""
        prompts = self.prompt_lengths
        responses = self.response_lengths
        in_prompt = (prompts.mean_square + prompts.mean) / 2
        in_response = prompts.mean * responses.mean + (responses.mean_square + responses.mean) / 2
        return self.train_batch_size * (in_prompt + self.n * in_response)

    def engine_role(self, stage: EngineStage) -> tuple[ModelShape, Lengths, Lengths]:
        """Return the model of a stage's engines, and the lengths of its inputs and outputs."""
        if stage == "generation":
            return self.policy, self.prompt_lengths, self.response_lengths
        if self.judge is None or self.judge_lengths is None:
            raise PlacementError("job.judge is None; expected a model where costs.reward is given")
        response = self.response_lengths
        read = Lengths(values=response.values + self.prompt_lengths.mean, edges=response.edges)
        return self.judge, read, self.judge_lengths


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step by stage, one after the other.

    Example:
        >>> policy = ModelShape.from_config(json.loads(Path("model/config.json").read_text()))
        >>> lengths = Lengths.recorded([500])
        >>> job = Job(policy=policy, prompt_lengths=lengths, response_lengths=lengths, train_batch_size=32, n=8)
        >>> engine = EngineCosts(devices_per_replica=1, max_num_seqs=64, decode_base_s=0.01, decode_per_sequence_s=1e-4)
        >>> costs = JobCosts(policy=engine, reward=None, training=TrainingCosts(per_token_s=1e-4))
        >>> step = predict_step(costs, job, strategy="colocated", num_devices=4, policy_devices=4, reward_devices=0)
        >>> round(step.generation_s, 2), round(step.total_s, 2)
        (8.2, 11.8)
    """

    generation_s: float
    reward_s: float
    """Seconds after generation, where both co-exist."""
    swap_s: float
    preparation_s: float
    training_s: float
    weight_sync_s: float

    @property
    def total_s(self) -> float:
        return sum(vars(self).values())


def predict_step(
    costs: JobCosts,
    job: Job,
    *,
    strategy: Strategy,
    num_devices: int,
    policy_devices: int,
    reward_devices: int,
) -> StepTime:
    """Predict the mean time of a step.

    Colocated: each wave of sampling wakes the policy, generates, swaps it for the judge, and rewards. Split and
    dynamic: both run at the same time, a wave takes as long as the slower one, and the last response is judged after
    that; one sleep and one wake-up a step free memory for training. A dynamic partition is taken where it settles.

    Args:
        num_devices: all devices; they train together, and serve both roles in colocated.
        policy_devices: devices that generate, at least a replica.
        reward_devices: devices of the judge, 0 without one.
    """
    check_known("strategy", strategy, PLANNED)

    def seconds(stage: EngineStage, role: str, devices: int, engine: EngineCosts) -> Floats:
        least = engine.devices_per_replica
        if not least <= devices <= num_devices:
            raise refusal(
                f"{role}_devices",
                devices,
                f"at least a replica ({least}), at most all ({num_devices})",
            )
        return waves_seconds(engine, job, stage, np.array([devices // least], dtype=np.float64))

    generation = seconds("generation", "policy", policy_devices, costs.policy)
    reward = np.zeros_like(generation)
    if costs.reward is not None:
        judging = seconds("reward", "reward", reward_devices, costs.reward)
        last_s = last_judgement_s(costs.reward, job)
        reward = added_by_reward(generation, judging, strategy=strategy, last_s=last_s)
    preparation_s, training_s = training_seconds(
        costs.training, job.training_tokens, job.training_pairs, num_devices
    )
    return StepTime(
        generation_s=float(job.wave_chances @ generation[:, 0]),
        reward_s=float(job.wave_chances @ reward[:, 0]),
        swap_s=num_swaps(job, strategy=strategy) * (costs.swap.sleep_s + costs.swap.wake_s),
        preparation_s=float(preparation_s),
        training_s=float(training_s),
        weight_sync_s=costs.training.sync_s,
    )


def training_seconds(
    costs: TrainingCosts | TrainingLaws, tokens: float, pairs: float, num_devices: int
) -> tuple[Floats, Floats]:
    """Return the seconds of preparation and of training for a step of T tokens and A attended pairs.

    Training takes, on each of D even devices, base_s + (per_token_s * T + per_pair_s * A) / D, and a pass that only
    scores takes `forward_share` of the second term.
    """
    pass_s = np.asarray(costs.per_token_s * tokens + costs.per_pair_s * pairs) / num_devices
    return costs.num_forward_passes * costs.forward_share * pass_s, costs.base_s + pass_s


def added_by_reward(
    generation: Floats, judging: Floats, *, strategy: Strategy, last_s: Floats
) -> Floats:
    """Return the seconds that judging adds to the generation of each wave: [num_waves, ...]."""
    if STRATEGIES[strategy].is_time_shared:
        return judging
    return np.maximum(judging - generation, 0.0) + last_s


def num_swaps(job: Job, *, strategy: Strategy) -> float:
    """Return the mean number of times that engines sleep and wake in a step."""
    takes_turns = job.judge is not None and STRATEGIES[strategy].is_time_shared
    return 2 * float(job.wave_chances.sum()) if takes_turns else 1.0


def last_judgement_s(engine: EngineCosts | EngineLaws, job: Job) -> Floats:
    """Return the seconds of the last judgement, which nothing hides, of a response read and judged alone."""
    _, read, written = job.engine_role("reward")
    return np.asarray(
        engine.prefill_per_token_s * read.longest + engine.decode_base_s * written.mean
    )


def waves_seconds(
    engine: EngineCosts | EngineLaws, job: Job, stage: EngineStage, num_replicas: Floats
) -> Floats:
    """Return the seconds of each wave of generation or reward on each number of replicas: [num_waves, num_replicas].

    The law of `EngineCosts` is summed over the decoding steps of the replica with the longest sequence: each sequence
    adds its share to as many steps as it has tokens. There are as many steps as the longest has tokens; or, where
    sequences wait, as many as pass until the last has started and all that then run have ended.
    """
    _, read, written = job.engine_role(stage)
    # The policy reads a prompt once for a group, the judge for each response.
    num_reads = 1 if stage == "generation" else job.n
    prompt_mean = read.mean
    context_tokens = prompt_mean * written.mean + (written.mean_square + written.mean) / 2
    rows: list[Floats] = []
    for prompts in job.wave_prompts.tolist():
        num_sequences = prompts * job.n
        read_tokens = prompts * num_reads * prompt_mean
        replica_seqs = np.maximum(num_sequences / num_replicas, min(1.0, num_sequences))
        steps = np.full(replica_seqs.shape, written.expected_longest(num_sequences))
        waiting = replica_seqs > engine.max_num_seqs
        if waiting.any():
            remaining = written.remaining()
            # Where some laws make sequences wait, all are for the most sequences that memory holds.
            max_num_seqs = float(np.max(engine.max_num_seqs))
            last_begins = replica_seqs * written.mean / engine.max_num_seqs - remaining.mean
            drained = last_begins + remaining.expected_longest(max_num_seqs)
            steps = np.where(waiting, np.maximum(steps, drained), steps)
        rows.append(
            engine.decode_base_s * steps
            + engine.decode_per_sequence_s * replica_seqs * written.mean
            + engine.decode_per_context_token_s * replica_seqs * context_tokens
            + engine.prefill_per_token_s * replica_seqs * (read_tokens / num_sequences)
        )
    return np.stack(rows)


@dataclass(kw_only=True, eq=False)
class Correction(CheckedQuantities):
    """Factors by which measured seconds exceed predicted ones, stage by stage.

    A factor is the weighted median of the last ratios of measured to predicted seconds; a ratio's weight halves every
    `half_life` further ones. So it follows a change within about `half_life` observations, and no single one, however
    wild, moves it beyond its neighbours.

    Example:
        >>> correction = Correction()
        >>> for measured_s in (12.0, 12.0, 90.0):
        ...     correction.observe("training", predicted_s=10.0, measured_s=measured_s)
        >>> correction.factor("training")
        1.2
        >>> resumed = Correction()
        >>> resumed.load_state(correction.state())
        >>> resumed.factor("training")
        1.2
    """

    half_life: Above0 = 8.0
    """Observations after which one counts half."""
    window: Positive = 64
    """Observations of a stage that are kept."""
    min_count: Positive = 3
    """Observations of a stage below which its factor is 1, at most `window`."""
    most: float = 16.0
    """Factors stay between 1 / most and most, which is at least 1."""
    _ratios: dict[Stage, list[float]] = field(
        init=False, default_factory=lambda: {stage: [] for stage in STAGES}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_count > self.window:
            raise refusal("min_count", self.min_count, f"at most window ({self.window})")
        if not 1 <= self.most < np.inf:
            raise refusal("most", self.most, "a finite number of at least 1")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load the correction of a run: its folder, its `placement.json`, or a file with `state()` alone."""
        accepted = f"a run's folder with {RUN_FILE}, or such a file"
        contents = read_json(
            "correction", path, RUN_FILE, accepted=accepted, content="the state of a Correction"
        )
        correction = cls()
        correction.load_state(contents.get("correction", contents))
        return correction

    def observe(self, stage: Stage, *, predicted_s: float, measured_s: float) -> None:
        """Observe the seconds of a kind of work, above 0: measured, and as the uncorrected model predicts them."""
        check_known("stage", stage, STAGES)
        check_above_0("predicted_s", predicted_s)
        check_above_0("measured_s", measured_s)
        ratios = self._ratios[stage]
        ratios.append(measured_s / predicted_s)
        del ratios[: -self.window]

    def factor(self, stage: Stage) -> float:
        """Return measured over predicted seconds of a stage. Raises PlacementError if the stage is not known."""
        check_known("stage", stage, STAGES)
        ratios = np.array(self._ratios[stage])
        if len(ratios) < self.min_count:
            return 1.0
        # The weighted median: the least ratio at and below which half of the weight lies.
        order = np.argsort(ratios, kind="stable")
        cumulated = np.cumsum((0.5 ** (np.arange(len(ratios))[::-1] / self.half_life))[order])
        median = ratios[order][np.searchsorted(cumulated, cumulated[-1] / 2)]
        return float(np.clip(median, 1 / self.most, self.most))

    def correct(self, costs: JobCosts) -> JobCosts:
        """Return the costs with each stage's seconds times its factor."""
        return JobCosts(
            policy=times(costs.policy, self.factor("generation")),
            reward=None if costs.reward is None else times(costs.reward, self.factor("reward")),
            training=replace(
                self.training(costs.training),
                sync_s=self.factor("weight_sync") * costs.training.sync_s,
            ),
            swap=times(costs.swap, self.factor("swap")),
        )

    def training(self, costs: Training) -> Training:
        """Return the laws of training and preparation times their factors."""
        training = self.factor("training")
        preparation = self.factor("preparation")
        return replace(
            times(costs, training), forward_share=costs.forward_share * (preparation / training)
        )

    def state(self) -> dict[str, Any]:
        """Return the state for `load_state`, as plain data for JSON."""
        return {"ratios": {stage: list(ratios) for stage, ratios in self._ratios.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the ratios of a state, but no settings; on a PlacementError nothing has changed."""
        # A state from a file may be of any type.
        untyped: Any = state
        ratios = untyped.get("ratios") if isinstance(untyped, Mapping) else None
        if not isinstance(ratios, Mapping) or set(ratios) != set(STAGES):
            raise refusal("state", state, f"of Correction.state(): ratios of {', '.join(STAGES)}")
        checked: dict[Stage, list[float]] = {}
        for stage in STAGES:
            if not isinstance(ratios[stage], list):
                raise refusal(f"ratios.{stage}", ratios[stage], "a list")
            for ratio in ratios[stage]:
                check_above_0(f"ratios.{stage}", ratio)
            checked[stage] = [float(ratio) for ratio in ratios[stage]][-self.window :]
        self._ratios = checked


_MEASURED: Mapping[Stage, str] = {
    "generation": "timing_s/gen",
    "reward": "timing_s/reward",
    "preparation": "timing_s/prepare",
    "training": "timing_s/train",
    "weight_sync": "timing_s/sync",
}


def forecast_step(
    metrics: Mapping[str, float],
    *,
    job: Job,
    predict: Callable[[Job], StepTime],
    correction: Correction,
    save: Callable[[Callable[[Path], object]], object],
) -> dict[str, float]:
    """Predict a step of a run of gcore-llm from its sampled lengths, and correct the laws by its measured seconds.

    Args:
        metrics: of the step.
        job: the run's job at its full size.
        predict: `predict_step` for the run's costs and devices.
        correction: is given the step's seconds.
        save: writes `placement.json`: it calls its argument with the path to write to.

    Returns:
        The predicted seconds of the step's stages, and their error as a share of the measured ones; empty if it has
        neither.

    Example:
        >>> policy = ModelShape.from_config(json.loads(Path("model/config.json").read_text()))
        >>> lengths = Lengths.recorded([300])
        >>> job = Job(policy=policy, prompt_lengths=lengths, response_lengths=lengths, train_batch_size=8, n=4)
        >>> law = StepTime(generation_s=20, reward_s=0, swap_s=0, preparation_s=0, training_s=10, weight_sync_s=0)
        >>> run = {"job": job, "predict": lambda job: law, "correction": Correction()}
        >>> metrics = {"sampling/groups": 8, "sampling/acceptance": 1.0, "prompt_length/mean": 300,
        ...     "response_length/mean": 300, "response_length/max": 300, "timing_s/gen": 24, "timing_s/train": 10}
        >>> forecast = forecast_step(metrics, **run, save=lambda write: write(Path("placement.json")))
        >>> round(forecast["forecast/error"], 3)
        -0.118
    """
    if not metrics.get("sampling/groups") or "response_length/mean" not in metrics:
        return {}
    groups = metrics["sampling/groups"]
    step_job = replace(
        job,
        prompt_lengths=Lengths.recorded([max(1.0, metrics["prompt_length/mean"])]),
        response_lengths=lengths_of(
            metrics["response_length/mean"],
            metrics["response_length/max"],
            count=groups * job.n,
        ),
        train_batch_size=round(groups),
        acceptance=min(1.0, max(metrics["sampling/acceptance"], 1e-3)),
    )
    law = predict(step_job)
    predicted_s = 0.0
    measured_s = 0.0
    for stage, name in _MEASURED.items():
        law_s = getattr(law, f"{stage}_s")
        took_s = metrics.get(name, 0.0)
        if law_s > 0 and took_s > 0:
            predicted_s += law_s * correction.factor(stage)
            measured_s += took_s
            correction.observe(stage, predicted_s=law_s, measured_s=took_s)
    state = json.dumps({"correction": correction.state()})
    save(lambda path: path.write_text(state))
    if not measured_s:
        return {}
    return {"forecast/stages_s": predicted_s, "forecast/error": predicted_s / measured_s - 1}
