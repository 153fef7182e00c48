"""The protocol between the RLHF loop and an app: its settings, what is sampled, how it is scored, how it is trained."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from gcore_controller.context import Context, DeviceTimers, Span
from gcore_controller.rlhf.events import Round
from gcore_controller.trainer_client import PolicyEngine, TrainerClient
from gcore_controller.trainer_group import State

Schedule = Literal["sync", "one_step_off", "async"]

RewardCalls = tuple[int, list[Any]]
"""The number of reward calls in some period, and the failures: dataclasses with ``kind``, ``message`` and ``count``."""


@dataclass(frozen=True, kw_only=True)
class RLHFConfig:
    """Settings of the loop that do not depend on what is trained.

    Example:
        >>> from dataclasses import replace
        >>> config = RLHFConfig(total_steps=100, train_batch_size=32, test_freq=10)
        >>> overlapped = replace(config, schedule="async", max_staleness=2, filter_groups=True)
        >>> config.schedule, overlapped.schedule, overlapped.train_batch_size
        ('sync', 'async', 32)
    """

    total_steps: int
    train_batch_size: int
    """Groups per step over all controllers."""
    test_freq: int
    """Steps between evaluations; the last step is evaluated, too."""
    schedule: Schedule = "sync"
    filter_groups: bool = False
    """Drop groups without a learning signal and sample other prompts in their place."""
    max_num_gen_batches: int = 1
    """Most waves of sampling per step, with ``filter_groups``."""
    curriculum: bool = False
    """Pass over prompts that are too easy or too hard at present; see `Curriculum`."""
    partial_rollout: bool | Literal["wait"] = False
    """Stop sampling when enough groups are complete, and continue the others in the next step. A group that the next
    batch would be too old for is dropped, and its prompt sampled again; with "wait" the batch waits for it."""
    tail_batching: bool = False
    """Defer prompts with long samples to a few long steps; see `TailBatching`. Only with the schedule sync."""
    short_length: int = 0
    """Length at which a sample defers its prompt, with ``tail_batching``; 0: it follows the lengths of samples."""
    over_sample_rate: float = 0.0
    """Additional prompts started with ``partial_rollout`` or ``tail_batching``, as a fraction of those needed. With
    the schedule async, ``partial_rollout`` starts as many as the engine has capacity for."""
    max_staleness: int = 1
    """Largest age of a group, where it may be above 0 at all: the number of weight versions from the oldest of its
    tokens to its update."""
    shuffle_seed: int = 0
    num_workers: int = 0
    """Threads that read prompts ahead."""
    log_samples: int = 0
    """Samples of each step that are recorded, of all controllers together; see `Modality.samples`."""
    reports_waves: bool = False
    """Report each wave of sampling that another one follows in its step (a `Round`), to decide what runs where
    between them; with schedule sync."""
    max_failed_share: float = 1.0
    """Largest fraction of failed reward calls that a run tolerates."""


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """The point that a run starts or resumes from.

    Example:
        >>> reached = [{"sampler": {"acceptance": 0.5, "surplus": []}}]  # from the checkpoint of step 40
        >>> start = RunStart(first_step=40, is_evaluated=True, controllers=reached, is_policy_behind=True)
        >>> list(range(start.first_step + 1, 44))
        [41, 42, 43]
    """

    first_step: int = 0
    """Steps completed before."""
    is_evaluated: bool = False
    """Whether the evaluation after these steps, if one is due, is recorded already."""
    controllers: list[State] | None = None
    """The controllers' states to resume from, by rank; None: the run starts from scratch."""
    is_policy_behind: bool = False
    """Whether the engines lack the present weights of the models."""


class RLHFRoles(Protocol):
    """The role services that the loop needs; a modality's own roles have more."""

    @property
    def policy(self) -> PolicyEngine: ...
    @property
    def learner(self) -> TrainerClient[Any]: ...
    @property
    def devices(self) -> DeviceTimers: ...
    @property
    def owns_process(self) -> bool:
        """True if only this controller computes in its process."""
        ...


class PromptGroup(Protocol):
    """The scored samples of one prompt."""

    @property
    def prompt_index(self) -> int:
        """Position of the prompt in the global order, unique in the run."""
        ...

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version that generated any part of it; None: nothing has been generated yet."""
        ...

    @property
    def scores(self) -> Iterable[float]: ...
    @property
    def has_signal(self) -> bool:
        """True if there is something to learn from the group, because its scores differ."""
        ...

    def state(self) -> State:
        """Return plain arrays and numbers for a checkpoint; ``"ticket"`` is the prompt index."""
        ...


RolesT = TypeVar("RolesT", bound=RLHFRoles)
PromptT = TypeVar("PromptT")
GroupT = TypeVar("GroupT", bound=PromptGroup)
UpdateT = TypeVar("UpdateT")
EvaluationT = TypeVar("EvaluationT")


@dataclass(frozen=True, kw_only=True)
class Wave(Generic[PromptT]):
    """One controller's prompts of one wave of sampling.

    Example:
        >>> import asyncio
        >>> async def next_prompts(wave: Wave[str], count: int) -> list[tuple[int, str]]:
        ...     if wave.take is None:
        ...         return list(wave.prompts)
        ...     return list(await wave.take(count))
        >>> wave = Wave(step=1, prompts=[(0, "1 + 1 ="), (1, "2 + 3 =")])
        >>> asyncio.run(next_prompts(wave, 4))
        [(0, '1 + 1 ='), (1, '2 + 3 =')]
    """

    step: int
    """The training step that the batch is sampled for."""
    prompts: Sequence[tuple[int, PromptT]] = ()
    """With their prompt indices."""
    unfinished: Sequence[tuple[Any, PromptT]] = ()
    """Groups to continue, with partial rollout."""
    quota: int | None = None
    """Number of complete groups after which the others are cut short; None: all are completed."""
    may_stop: Callable[[Sequence[int]], bool] | None = None
    """With a quota: returns whether groups that started with these weight versions may be cut short; until then others
    are completed, too. None: any may."""
    take: Callable[[int], Awaitable[Sequence[tuple[int, PromptT]]]] | None = None
    """Returns at most so many further prompts, to be called whenever the engine has capacity; none: the wave is
    complete, or with a quota there may be some later. Only where `Modality.takes_prompts`, and with partial rollout."""
    max_length: int | None = None
    """Length at which a sample defers its prompt, with tail batching, in the unit of `Modality.longest`."""


@dataclass(frozen=True, kw_only=True)
class Generated(Generic[GroupT]):
    """The result of a wave; prompts in no list were dropped, because a reward gave no score.

    Example:
        >>> from types import SimpleNamespace
        >>> def split(groups: list, num_samples: int) -> Generated:
        ...     done = [group for group in groups if len(group.scores) == num_samples]
        ...     return Generated(groups=done, unfinished=[group for group in groups if group not in done])
        >>> groups = [SimpleNamespace(prompt_index=0, scores=[1, 0]), SimpleNamespace(prompt_index=1, scores=[1])]
        >>> wave = split(groups, num_samples=2)
        >>> len(wave.groups), wave.unfinished[0].prompt_index
        (1, 1)
    """

    groups: list[GroupT]
    unfinished: Sequence[GroupT] = ()
    """Groups some of whose samples were cut short, to be continued in a later step, with partial rollout."""
    deferred: Sequence[int] = ()
    """Prompt indices of groups with a sample that reached `Wave.max_length`."""


@dataclass(frozen=True, kw_only=True)
class TrainingBatch(Generic[GroupT]):
    """The groups that one step trains on.

    Example:
        >>> from types import SimpleNamespace
        >>> groups = [SimpleNamespace(prompt_index=i, scores=[0.0, 1.0]) for i in (2, 5)]
        >>> batch = TrainingBatch(groups=groups, num_groups=4, metrics={}, state={}, rounds=[])
        >>> [np.std(group.scores).item() for group in batch.groups]
        [0.5, 0.5]
        >>> len(batch.groups) / batch.num_groups  # this controller's share
        0.5
    """

    groups: list[GroupT]
    """This controller's share of the groups, by prompt index."""
    num_groups: int
    """Groups over all controllers."""
    metrics: dict[str, float]
    state: State
    """State of the batch producer after this batch."""
    rounds: Sequence[Round]
    """The rounds in which it was sampled: the waves that were reported, and the rest, whose work is not known yet."""
    filtered: Sequence[GroupT] = ()
    """This controller's groups that were sampled for the batch and dropped, because they carry no signal."""
    spans: Sequence[Span] = ()
    """Where the time of sampling went, if it ran concurrently with training."""


@dataclass(frozen=True, kw_only=True)
class Prepared(Generic[UpdateT]):
    """This controller's part of all optimizer updates of a step, in order.

    Example:
        >>> def prepare(rewards: list[float], num_updates: int) -> Prepared[list[float]]:
        ...     advantages = np.array(rewards) - np.mean(rewards)
        ...     updates = [part.tolist() for part in np.split(advantages, num_updates)]
        ...     return Prepared(updates=updates, metrics={Modality.HAS_SIGNAL: float(advantages.any())})
        >>> prepared = prepare([1.0, 0.0, 1.0, 2.0], num_updates=2)
        >>> prepared.updates, prepared.metrics
        ([[0.0, -1.0], [0.0, 1.0]], {'training/has_signal': 1.0})
    """

    updates: Sequence[UpdateT]
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    of_groups: Sequence[Any] = ()
    """Values that belong to each group of the batch, for `Modality.samples`."""


class Modality(ABC, Generic[RolesT, PromptT, GroupT, UpdateT, EvaluationT]):
    """Base class of what an app implements for `RLHFLoop`; each controller has an instance of its own.

    Every method that takes a context is called on all controllers, in the same order, and may use its collectives. With
    a schedule other than sync, `generate` and `sampled_part` run concurrently with the other methods, in a context
    with collectives and a timer of its own: use the one that is passed.

    Example:
        >>> class Words(Modality):
        ...     prompts = ["a short one", "another"]
        ...     throughput_of = "training/tokens"
        ...     def expected_work(self, prompt):
        ...         return float(len(prompt))
        >>> sorted(Words.__abstractmethods__)  # to be implemented, too
        ['generate', 'group_from_state', 'prepare', 'update', 'update_metrics', 'update_weights']
    """

    HAS_SIGNAL = "training/has_signal"
    """Metric of a step: 1 if its batch had something to learn from, 0 if all samples scored alike or none was kept."""
    throughput_of: str = ""
    """Metric that ``perf/throughput`` reports per second."""
    is_always_on_policy: bool = False
    """Whether all samples come from the present weights, and none is dropped or left unfinished; metrics say nothing of
    these then."""

    saves_evaluated: bool = False
    """Whether the recorder may save the policy when it gets an evaluation; the trainer is then awake."""

    @property
    @abstractmethod
    def prompts(self) -> Sequence[PromptT]:
        """The prompts to train on."""

    def drain_failures(self, ctx: Context[RolesT]) -> RewardCalls:
        """Return this controller's reward calls since this was called last, with the failures that were dropped."""
        del ctx
        return 0, []

    def takes_prompts(self, ctx: Context[RolesT]) -> bool:
        """Return whether controllers take prompts one by one, also from others, instead of a fixed share each."""
        del ctx
        return False

    def expected_work(self, prompt: PromptT) -> float:
        """Return how long a prompt is expected to take, in any unit: controllers take the longest of a wave first."""
        del prompt
        return 0.0

    @abstractmethod
    async def generate(self, ctx: Context[RolesT], wave: Wave[PromptT]) -> Generated[GroupT]:
        """Sample and score the prompts of a wave, in the stages ``gen`` and ``reward``."""

    @abstractmethod
    def group_from_state(self, state: State) -> GroupT:
        """Return the group whose `PromptGroup.state` this is."""

    def drop(self, group: GroupT) -> None:
        """End what continues of a group that is too old, whose prompt is sampled again."""
        del group

    async def close(self) -> None:
        """End work that continues between two waves, at the end of the run."""

    def longest(self, group: GroupT) -> int:
        """Return the length of a group's longest sample; needed only with tail batching, as `Wave.max_length` is."""
        raise NotImplementedError(f"{type(self).__name__} does not support tail batching")

    async def sampled_part(self, ctx: Context[RolesT], groups: Sequence[GroupT]) -> Any:
        """Return this controller's part of `sampled_metrics`: of all that it sampled for a batch, kept or not."""
        del ctx, groups

    def sampled_metrics(self, parts: Sequence[Any]) -> dict[str, float]:
        """Return metrics of everything that was sampled for a batch, from all controllers' parts, by rank.

        If every prompt of the batch failed, no part has a group.
        """
        del parts
        return {}

    def costs(self, groups: Sequence[GroupT]) -> list[float]:
        """Return the training cost of each group, in any unit."""
        return [1.0] * len(groups)

    def balance(self, costs: list[float], num_parts: int) -> Sequence[Sequence[int]]:
        """Return the indices of each controller's groups for training: by default in turn, whatever they cost.

        ``costs`` are those of all controllers' groups, by prompt index; ``num_parts`` is the number of controllers.
        """
        return [range(part, len(costs), num_parts) for part in range(num_parts)]

    @abstractmethod
    async def prepare(
        self, ctx: Context[RolesT], step: int, batch: TrainingBatch[GroupT]
    ) -> Prepared[UpdateT]:
        """Compute what the losses need, such as advantages, and `HAS_SIGNAL`; divide the groups into updates."""

    @abstractmethod
    async def update(self, ctx: Context[RolesT], step: int, update: UpdateT) -> dict[str, float]:
        """Perform one optimizer update on all controllers' parts together; the same metrics on every controller."""

    @abstractmethod
    def update_metrics(self, updates: Sequence[dict[str, float]]) -> dict[str, float]:
        """Combine the metrics of a step's updates."""

    @abstractmethod
    async def update_weights(self, ctx: Context[RolesT], step: int) -> None:
        """Give the engines the weights after ``step``."""

    async def synced_metrics(
        self, ctx: Context[RolesT], step: int, batch: TrainingBatch[GroupT]
    ) -> dict[str, float]:
        """Return metrics that need the engines with the weights that they have just received."""
        del ctx, step, batch
        return {}

    def samples(
        self,
        ctx: Context[RolesT],
        step: int,
        batch: TrainingBatch[GroupT],
        prepared: Prepared[UpdateT] | None,
    ) -> Sequence[tuple[int, dict[str, Any]]]:
        """Return samples of this controller to be recorded, as rows of JSON, each with a number.

        Of all controllers' rows, those with the `RLHFConfig.log_samples` lowest numbers are recorded. ``prepared`` is
        None if the batch has no group to train on.
        """
        del ctx, step, batch, prepared
        return ()

    async def evaluate(self, ctx: Context[RolesT], step: int) -> EvaluationT | None:
        """Evaluate the policy on held-out prompts; None, on every controller: there are none."""
        del ctx, step
        return None

    def sampling_state(self) -> State:
        """Return what `generate` has learned until now, which a checkpoint has to hold; the same on every controller.

        With a schedule other than sync it is ahead of what is trained on, and saved with the batch that it belongs to.
        """
        return {}

    def state(self) -> State:
        """Return what a checkpoint has to hold besides models and groups; the same on every controller."""
        return {}

    def load_state(self, state: State) -> None:
        """Restore `state` and `sampling_state`, which are parts of the first controller's whole state."""
        del state
