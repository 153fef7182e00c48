"""Turns of a trainer and engines on one device: who sleeps when, and that training does not depend on it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from tones import NUM_TONES, Roles, Synthesizer, Tones, Trainer

from gcore_controller import (
    Context,
    DeviceTimers,
    DeviceTurns,
    Evaluated,
    Event,
    Generated,
    InlineBackend,
    Lending,
    RLHFConfig,
    RLHFLoop,
    RunStart,
    StageTimer,
    Stepped,
    run_simulated,
)
from gcore_controller.runtimes.inline import SharedTrainerClient

CONFIG = RLHFConfig(
    total_steps=3, train_batch_size=6, test_freq=2, filter_groups=True, max_num_gen_batches=8
)


@dataclass
class SharedDevice:
    """The memory of a device: what is awake on it, with a log."""

    awake: set[str] = field(default_factory=lambda: {"trainer"})
    log: list[str] = field(default_factory=list[str])

    def wake(self, *names: str) -> None:
        self.awake |= {*names}
        self.log.append("+" + " ".join(names))

    def sleep(self, *names: str) -> None:
        self.awake -= {*names}
        self.log.append("-" + " ".join(names))


@dataclass
class SleepingSynthesizer(Synthesizer):
    """An engine that samples only with weights and cache awake, next to no trainer."""

    device: SharedDevice = field(default_factory=SharedDevice)
    name: str = "engine"
    num_aborts: int = 0

    async def abort(self) -> None:
        self.num_aborts += 1

    async def sleep(self, *, keep_weights: bool = True) -> None:
        self.device.sleep(f"{self.name} {'kept' if keep_weights else 'dropped'}")
        self.device.awake -= {f"{self.name} weights", f"{self.name} cache"}

    async def wake(self, *, weights: bool = True, cache: bool = True) -> None:
        parts = {"weights": weights, "cache": cache}
        self.device.wake(*(f"{self.name} {part}" for part, wakes in parts.items() if wakes))

    async def play(
        self, indices: Sequence[int], n: int
    ) -> AsyncGenerator[tuple[int, NDArray[np.int64], int]]:
        assert self.device.awake == {
            "engine weights",
            "engine cache",
            "judge weights",
            "judge cache",
        }
        async for take in super().play(indices, n):
            yield take

    async def update_weights(self, weights: Any, *, version: int) -> None:
        assert self.device.awake == {"engine weights", "trainer"}
        await super().update_weights(weights, version=version)


class SleepingTrainer:
    def __init__(self, device: SharedDevice) -> None:
        self._device = device

    async def sleep(self, *, keep_weights: bool) -> None:
        self._device.sleep("trainer states" if keep_weights else "trainer")

    async def wake(self) -> None:
        self._device.wake("trainer")


class SwappedTrainer(Trainer):
    """A controller's trainer that trains only where no engine is awake."""

    def __init__(self, device: SharedDevice, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._device = device

    async def train_step(self, role: str, micro_batches: Any) -> dict[str, float]:
        assert self._device.awake == {"trainer"}
        return await super().train_step(role, micro_batches)


def take_turns(
    trainer: SleepingTrainer,
    *engines: SleepingSynthesizer,
    devices: DeviceTimers | None = None,
    ranks: Sequence[int] = (),
    lending: Lending | None = None,
) -> DeviceTurns:
    policy, *others = engines
    return DeviceTurns(
        policy,
        others,
        sleep_models=trainer.sleep,
        wake_models=trainer.wake,
        devices=devices or DeviceTimers(),
        ranks=ranks,
        lending=lending,
    )


def run(
    *, world_size: int, shares: bool, config: RLHFConfig = CONFIG, modality: type[Tones] = Tones
) -> tuple[list[dict[str, float]], SharedDevice]:
    logits, metrics, device = np.zeros(NUM_TONES), list[dict[str, float]](), SharedDevice()
    plain = Synthesizer(seconds=0.01)
    engine, judge = (
        SleepingSynthesizer(seconds=0.01, device=device, name=name) for name in ("engine", "judge")
    )
    turns = take_turns(SleepingTrainer(device), engine, judge, ranks=[0])

    async def record(event: Event) -> None:
        if isinstance(event, Evaluated):
            assert not shares or "trainer" not in device.awake
            if shares and modality.saves_evaluated:
                assert device.awake == {"engine weights"}, "the policy can come back to be saved"
        if isinstance(event, Stepped):
            assert not shares or "engine cache" not in device.awake, "the models can come back"
            metrics.append(
                {k: v for k, v in event.metrics.items() if not k.startswith(("timing_s/", "perf/"))}
            )

    async def program(ctx: Context[Any]) -> None:
        if shares:
            roles = Roles(
                policy=engine, learner=SwappedTrainer(device, logits, ctx.group, turns=turns)
            )
        else:
            roles = Roles(policy=plain, learner=Trainer(logits, ctx.group))
        await RLHFLoop(ctx.with_roles(roles), modality([5] * 30), config, RunStart(), record).run()

    run_simulated(program, roles=None, world_size=world_size)
    return metrics, device


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_with_turns_is_the_same(world_size: int) -> None:
    alone, _ = run(world_size=world_size, shares=False)
    shared, device = run(world_size=world_size, shares=True)
    assert shared == alone
    sync = ["-trainer states", "+engine weights"]
    sampling = ["-trainer", "+engine weights engine cache", "+judge weights judge cache"]
    training = ["-engine dropped", "-judge kept", "+trainer"]
    # The last turn of sampling is that of the last evaluation.
    assert device.log == [*sync, *sampling, *3 * [*training, *sync, *sampling]]


class Saving(Tones):
    """Its recorder saves the policy of some evaluations."""

    saves_evaluated = True


def test_the_policy_of_an_evaluation_is_saved_next_to_the_engines_weights() -> None:
    alone, _ = run(world_size=2, shares=False)
    shared, device = run(world_size=2, shares=True, modality=Saving)
    assert shared == alone
    assert device.log[-4:] == ["-engine kept", "-judge kept", "-trainer states", "+engine weights"]


async def test_a_swap_that_fails_is_tried_again() -> None:
    device = SharedDevice()
    engine = SleepingSynthesizer(seconds=0.0, device=device)
    turns = take_turns(SleepingTrainer(device), engine)
    wake = engine.wake

    async def broken(**parts: bool) -> None:
        del parts
        raise RuntimeError("no memory")

    engine.wake = broken
    with pytest.raises(RuntimeError, match="no memory"):
        await turns.take("sampling")
    assert turns.current is None
    engine.wake = wake
    await asyncio.gather(turns.take("sampling"), turns.take("sampling"))
    assert device.awake == {"engine weights", "engine cache"}
    assert device.log.count("+engine weights engine cache") == 1
    # Without an update in between, the weights are kept.
    await turns.take("sync")
    assert device.log[-3:] == ["-engine kept", "-trainer states", "+engine weights"]
    await turns.take("training")
    assert device.awake == {"trainer"}
    assert engine.num_aborts == 2


class Silent(Tones):
    """Nothing is kept of what is sampled."""

    async def generate(self, ctx: Any, wave: Any) -> Generated[Any]:
        return replace(await super().generate(ctx, wave), groups=[])

    def sampled_metrics(self, parts: Any) -> dict[str, float]:
        assert not any(parts)
        return {}


def test_a_step_without_an_update_keeps_the_weights() -> None:
    """The models can be saved after it all the same."""
    _, device = run(
        world_size=1, shares=True, config=replace(CONFIG, total_steps=1), modality=Silent
    )
    sync, sampling = (
        ["-trainer states", "+engine weights"],
        ["-trainer", "+engine weights engine cache", "+judge weights judge cache"],
    )
    assert device.log == [
        *sync,
        *sampling,
        "-engine kept",
        "-judge kept",
        *sync,
        *sampling,
    ]


async def test_what_ended_a_run_is_told_before_a_swap_that_fails() -> None:
    """An engine that died cannot sleep; the models are saved all the same."""
    device = SharedDevice()
    engine = SleepingSynthesizer(seconds=0.0, device=device)
    turns = take_turns(SleepingTrainer(device), engine)

    async def dead(**parts: bool) -> None:
        del parts
        raise RuntimeError("engine 0 is gone")

    async def program(ctx: Context[Any]) -> None:
        del ctx
        await turns.take("sampling")
        engine.sleep = dead
        raise ValueError("no reward")

    backend: InlineBackend[Any, Any, Any] = InlineBackend(
        None,
        roles=None,
        world_size=1,
        learner=cast(Any, None),
        program=lambda _job, _recorder: program,
        close_services=engine.abort,
        turns=turns,
    )
    with pytest.raises(ValueError, match="no reward") as caught:
        await backend.run(None, cast(Any, None))
    assert (
        "trainer and engines could not swap places: RuntimeError('engine 0 is gone')"
        in caught.value.__notes__[-1]
    )


@dataclass
class Alternating:
    """Ranks lend their devices in every second step."""

    lends: bool = False
    seen: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])

    def observe(self, *, generation_s: float, generated: float, swap_s: float) -> bool:
        self.seen.append((generation_s, generated, swap_s))
        self.lends = not self.lends
        return self.lends


class SlowTrainer(SleepingTrainer):
    async def sleep(self, *, keep_weights: bool) -> None:
        await asyncio.sleep(0.0 if keep_weights else 0.25)
        await super().sleep(keep_weights=keep_weights)


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_lend_their_devices_in_the_steps_in_which_a_rule_says_so(world_size: int) -> None:
    """Engines wake for an update of their weights; without it they sleep through the step, in which nothing swaps."""
    device, rule, devices = SharedDevice(), Alternating(), DeviceTimers()
    engine = SleepingSynthesizer(seconds=0.01, device=device)
    lending = Lending(num_engines=3, choose=rule.observe)
    turns = take_turns(SlowTrainer(device), engine, devices=devices, ranks=[0], lending=lending)
    lent: list[int] = []

    async def program(ctx: Context[Any]) -> None:
        client = SharedTrainerClient[Any](
            cast("Any", None),
            ctx.group,
            devices,
            turns=turns,
        )
        timer = StageTimer(ctx.clock)
        await client.onload_weights(timer)
        for _ in range(4):
            await client.offload(timer)
            with timer.stage("gen"):
                await asyncio.sleep(0.5)
            devices.generated["gen"] = 7
            await client.onload(timer)
            await client.onload_weights(timer)
            if ctx.rank == 0:
                lent.append(devices.num_lent)
                devices.drain()
            timer.drain()
            await ctx.group.barrier()

    run_simulated(program, roles=None, world_size=world_size)
    assert lent == [0, 3, 0, 3]
    assert rule.seen == [(0.5, 7, swap_s) for swap_s in (0.0, 0.25, 0.0, 0.25)]
    loan = [
        "-trainer states",
        "+engine weights",
        "-trainer",
        "+engine weights engine cache",
        "-engine dropped",
        "+trainer",
    ]
    assert device.log == 2 * loan
