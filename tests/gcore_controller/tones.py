"""A third app in small: a policy that plays tones, trained by the RLHF loop through a `Modality` of its own."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_controller import (
    Collectives,
    Context,
    DeviceTimers,
    DeviceTurns,
    Generated,
    Modality,
    Prepared,
    State,
    TrainerClient,
    TrainingBatch,
    Wave,
)

NUM_TONES = 8


def probabilities(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


@dataclass
class Synthesizer:
    """The engine: it draws tones from a softmax of its weights."""

    logits: NDArray[np.float64] = field(default_factory=lambda: np.zeros(NUM_TONES))
    weight_version: int = 0
    seconds: float = 0.01
    """Of one take."""

    async def update_weights(self, weights: NDArray[np.float64], *, version: int) -> None:
        self.logits, self.weight_version = weights.copy(), version

    async def abort(self) -> None:
        """Do nothing, as the next two: it has a device of its own."""

    async def sleep(self, *, keep_weights: bool = True) -> None: ...
    async def wake(self, *, weights: bool = True, cache: bool = True) -> None: ...

    async def play(
        self, indices: Sequence[int], n: int
    ) -> AsyncIterator[tuple[int, NDArray[np.int64], int]]:
        """Yield the prompt index, [n] tones and the weight version of each take."""
        for index in indices:
            tones = np.random.default_rng(index).choice(
                NUM_TONES, size=n, p=probabilities(self.logits)
            )
            version = self.weight_version
            await asyncio.sleep(self.seconds)
            yield index, tones, version


class Trainer(TrainerClient[list[tuple[int, int, float]]]):
    """One controller's end of the weights in training, which all controllers share; an update takes ``seconds``."""

    def __init__(
        self,
        logits: NDArray[np.float64],
        group: Collectives,
        *,
        seconds: float = 0.01,
        turns: DeviceTurns | None = None,
    ) -> None:
        super().__init__(group, DeviceTimers(), turns=turns)
        self.logits = logits
        self.seconds = seconds

    @property
    def num_replicas(self) -> int:
        return 1

    @property
    def can_score_alone(self) -> bool:
        return False

    async def train_step(
        self, role: str, micro_batches: Sequence[list[tuple[int, int, float]]]
    ) -> dict[str, float]:
        """Perform an update of REINFORCE on (prompt index, tone, advantage) of all controllers."""
        del role
        [samples] = micro_batches
        everyones = sorted(s for part in await self.group.all_gather(samples) for s in part)
        await asyncio.sleep(self.seconds)
        if self.group.rank == 0:
            gradient = np.zeros(NUM_TONES)
            for _, tone, advantage in everyones:
                gradient += advantage * (np.eye(NUM_TONES)[tone] - probabilities(self.logits))
            self.logits += 0.5 * gradient / max(len(everyones), 1)
        await self.group.barrier()
        return {"actor/samples": float(len(everyones))}

    async def update_weights(
        self, policy: Synthesizer, *, version: int, averaged: bool = False
    ) -> None:
        assert not averaged
        if self.group.rank == 0:
            await policy.update_weights(self.logits, version=version)
        await self.group.barrier()

    async def score(
        self, role: str, micro_batches: Sequence[Any], *, with_routing: bool = False
    ) -> list[list[Any]]:
        raise NotImplementedError

    async def score_alone(self, role: str, micro_batch: Any) -> list[Any]:
        raise NotImplementedError

    async def check_policy(self, policy: Synthesizer) -> None:
        assert np.array_equal(policy.logits, self.logits)
        await self.group.barrier()


@dataclass(frozen=True, kw_only=True)
class Roles:
    policy: Synthesizer
    learner: Trainer
    devices: DeviceTimers = field(default_factory=DeviceTimers)
    owns_process: bool = False


@dataclass(frozen=True)
class Take:
    """A group: the tones played for one prompt, which asks for a tone; none if it was cut short before the first."""

    prompt_index: int
    tones: NDArray[np.int64]
    scores: NDArray[np.float64]
    oldest_version: int | None

    @property
    def has_signal(self) -> bool:
        return bool(np.ptp(self.scores) > 0)

    def state(self) -> State:
        return {
            "ticket": self.prompt_index,
            **{k: v for k, v in vars(self).items() if k != "prompt_index"},
        }


class Tones(Modality[Roles, int, Take, list[tuple[int, int, float]], float]):
    """Prompts are tones; the closer a tone is to its prompt, in whole steps, the higher is its score."""

    throughput_of = "perf/num_tones"
    n = 3

    def __init__(self, prompts: Sequence[int]) -> None:
        self._prompts = prompts

    @property
    def prompts(self) -> Sequence[int]:
        return self._prompts

    async def generate(self, ctx: Context[Roles], wave: Wave[int]) -> Generated[Take]:
        asked = dict(wave.prompts) | {u.prompt_index: tone for u, tone in wave.unfinished}
        if wave.take is not None:
            asked |= dict(await wave.take(1000))
        played = sorted(asked)[: wave.quota]
        takes: list[Take] = []
        with ctx.timer.stage("gen"):
            async for index, tones, version in ctx.roles.policy.play(played, self.n):
                scores = -(np.abs(tones - asked[index]) // 2).astype(np.float64)
                takes.append(Take(index, tones, scores, version))
        version = ctx.roles.policy.weight_version
        nothing = np.zeros(0, np.int64)
        left = sorted(asked)[len(played) :]
        unfinished = [Take(index, nothing, nothing.astype(np.float64), version) for index in left]
        return Generated(groups=takes, unfinished=unfinished)

    def group_from_state(self, state: State) -> Take:
        return Take(state["ticket"], state["tones"], state["scores"], state["oldest_version"])

    async def sampled_part(self, ctx: Context[Roles], groups: Sequence[Take]) -> list[float]:
        del ctx
        return [float(score) for g in groups for score in g.scores]

    def sampled_metrics(self, parts: Sequence[list[float]]) -> dict[str, float]:
        scores = sorted(score for part in parts for score in part)
        mean = {"critic/score/mean": float(np.mean(scores))} if scores else {}
        return mean | {"perf/num_tones": float(len(scores))}

    async def prepare(
        self, ctx: Context[Roles], step: int, batch: TrainingBatch[Take]
    ) -> Prepared[Any]:
        del step
        samples = [
            (g.prompt_index, int(tone), float(score - g.scores.mean()))
            for g in batch.groups
            for tone, score in zip(g.tones, g.scores, strict=True)
        ]
        num_signals = await ctx.group.all_reduce(sum(g.has_signal for g in batch.groups))
        halves = [[s for s in samples if s[0] % 2 == half] for half in range(2)]
        return Prepared(updates=halves, metrics={self.HAS_SIGNAL: float(num_signals > 0)})

    async def update(
        self, ctx: Context[Roles], step: int, update: list[tuple[int, int, float]]
    ) -> dict[str, float]:
        del step
        return await ctx.roles.learner.train_step("actor", [update])

    def update_metrics(self, updates: Sequence[dict[str, float]]) -> dict[str, float]:
        return updates[-1]

    async def update_weights(self, ctx: Context[Roles], step: int) -> None:
        await ctx.roles.learner.update_weights(ctx.roles.policy, version=step)

    async def evaluate(self, ctx: Context[Roles], step: int) -> float:
        del step
        return float(
            probabilities(ctx.roles.policy.logits)
            @ -np.abs(np.arange(NUM_TONES) - self._prompts[0])
        )


class Streams(Tones):
    """Plays up to ``slots`` takes at once, each as long as its draw of a mean of ``mean_s`` seconds.

    Takes that were cut short continue where they were; one that is played again is drawn again.
    """

    slots = 8
    mean_s = 4.0
    sigma = 0.5

    def __init__(self, prompts: Sequence[int]) -> None:
        super().__init__(prompts)
        self._left_s: dict[int, float] = {}
        """Seconds that are left of takes that were cut short."""
        self._draws = np.random.default_rng(0)
        self.num_dropped = 0
        self.playing: list[tuple[float, int]] = []
        """The takes that play at once, from a moment on."""

    def drop(self, group: Take) -> None:
        self.num_dropped += 1
        self._left_s.pop(group.prompt_index, None)

    def samples(
        self, ctx: Any, step: int, batch: TrainingBatch[Take], prepared: Prepared[Any] | None
    ) -> list[tuple[int, dict[str, Any]]]:
        del ctx, step, prepared
        return [(take.prompt_index, {"prompt_index": take.prompt_index}) for take in batch.groups]

    async def generate(self, ctx: Context[Roles], wave: Wave[int]) -> Generated[Take]:
        ends: dict[int, tuple[float, int]] = {}
        takes: list[Take] = []
        assert wave.take is not None
        assert wave.quota is not None

        def start(index: int, version: int | None) -> None:
            drawn_s = self.mean_s * self._draws.lognormal(-(self.sigma**2) / 2, self.sigma)
            end_s = ctx.clock() + self._left_s.pop(index, drawn_s)
            ends[index] = end_s, ctx.roles.policy.weight_version if version is None else version

        with ctx.timer.stage("gen"):
            for take, _ in wave.unfinished:
                start(take.prompt_index, take.oldest_version)
            while True:
                versions = [version for _, version in ends.values()]
                if len(takes) >= wave.quota and (not wave.may_stop or wave.may_stop(versions)):
                    break
                for index, _ in await wave.take(self.slots - len(ends)):
                    start(index, None)
                self.playing.append((ctx.clock(), len(ends)))
                if not ends:
                    break
                end_s, index = min((end_s, index) for index, (end_s, _) in ends.items())
                await asyncio.sleep(end_s - ctx.clock())
                takes.append(self._take(index, ends.pop(index)[1]))
        for index, (end_s, _) in ends.items():
            self._left_s[index] = end_s - ctx.clock()
        unfinished = [self._take(index, version) for index, (_, version) in ends.items()]
        return Generated(groups=takes, unfinished=unfinished)

    def _take(self, index: int, version: int) -> Take:
        tones = np.random.default_rng(index).integers(0, NUM_TONES, self.n)
        return Take(index, tones, tones.astype(np.float64), version)
