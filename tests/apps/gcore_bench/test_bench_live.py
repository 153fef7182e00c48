"""The live part of the bench of placement: its engine, its tables; the runs are those of `--quick`."""

import time
import tomllib
from functools import partial
from pathlib import Path
from runpy import run_path

import pytest
import torch

from gcore_bench.harness.report import Row
from gcore_bench.placement.live import QUICK, are_alike, check_aims, list_runs, write_config
from gcore_bench.placement.paced_engine import PacedEngine, compute_paced_loss, get_phase_tokens
from gcore_ckpt import load
from gcore_rollout import HFEngine, Request, SamplingParams
from gcore_trainer import PolicyLossConfig, PolicyTokens

OPTIONS = (
    "--rollout.num-processes",
    "--reward-model.judge.num-processes",
    "--trainer.num-processes",
)

ROW: Row = {
    "run": "dynamic",
    "seconds": 80.0,
    "moved_to_judge": 1,
    "moved_to_policy": 2,
    "idle_percent": 30.0,
}


async def sampled(engine: HFEngine) -> list[list[int]]:
    request = Request(
        request_id="a",
        prompt_token_ids=(5, 6, 7),
        sampling=SamplingParams(max_tokens=12, temperature=1.0),
        n=3,
        seed=1,
    )
    found = [completion async for completion in engine.generate([request])]
    return [c.token_ids.tolist() for c in sorted(found, key=lambda completion: completion.index)]


async def test_a_paced_engine_samples_the_same_but_for_lengths(tiny: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    engine = PacedEngine.load(
        tiny, step_s=0.002, most_tokens=partial(get_phase_tokens, metrics, 2, (3, 12, 6))
    )
    plain = HFEngine.from_pretrained(tiny, eos_token_ids=())
    expected = await sampled(plain)
    lengths: list[int] = []
    found: list[list[int]] = []
    for step in range(7):
        found = await sampled(engine)
        lengths.append(len(found[0]))
        assert found == [tokens[: lengths[-1]] for tokens in expected]
        with metrics.open("a") as file:
            file.write(
                f'{{"step": {step}, "timing_s/step": 1.0}}\n{{"step": {step}, "val/x": 1.0}}\n'
            )
    assert lengths == [3, 3, 12, 12, 6, 6, 6]
    await engine.sleep()
    await engine.wake()
    assert await sampled(engine) == found
    await plain.close()
    await engine.close()


async def test_only_a_swap_of_weights_takes_time(tiny: Path) -> None:
    """Once, however often it is asked for, and not for keys and values alone."""
    engine = PacedEngine.load(tiny, step_s=0.0, swap_s=0.05)
    start_s = time.monotonic()
    await engine.sleep(keep_weights=False)
    await engine.sleep()
    await engine.wake(cache=False)
    await engine.update_weights(load(tiny).items(), version=1)
    await engine.wake()
    assert 0.1 <= time.monotonic() - start_s < 10.0
    await engine.close()


def test_training_is_paced_by_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    log_probs, advantages = (
        torch.tensor([-1.0, -2.0, -3.0], requires_grad=True),
        torch.tensor([1.0, -1.0, 0.5]),
    )
    tokens = PolicyTokens(
        log_probs=log_probs,
        old_log_probs=log_probs.detach(),
        advantages=advantages,
        mask=torch.ones(3, dtype=torch.bool),
        lengths=[2, 1],
    )
    loss = compute_paced_loss(0.25, tokens, PolicyLossConfig())
    assert waits == [0.75]
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, -advantages, rtol=0, atol=0)


def test_every_placement_runs_on_the_same_number_of_devices() -> None:
    static = ["static 1 + 3", "static 2 + 2", "static 3 + 1"]
    assert list(list_runs(4)) == ["split 1 + 1 + 2", "colocated", *static, "dynamic"]
    for num_devices in (3, 4, 5, 8):
        for name, options in list_runs(num_devices).items():
            values = dict(option.split("=") for option in options)
            policy, judge, ranks = (int(values[option]) for option in OPTIONS)
            shares = values["--rollout.colocated"] == "True"
            assert shares == (not name.startswith("split"))
            assert (ranks if shares else policy + judge + ranks) == num_devices
            assert (
                (policy == judge == num_devices)
                if name == "colocated"
                else (policy + judge <= num_devices)
            )
            assert min(policy, judge, ranks) > 0


def test_settings_of_a_run_name_its_engines(tmp_path: Path) -> None:
    config = tomllib.loads(
        write_config(tmp_path, tmp_path / "runs" / "run-0", QUICK, seed=3).read_text()
    )
    engine, name = config["rollout"]["engine"].rsplit(":", 1)
    policy = run_path(engine)[name]
    assert policy.keywords["step_s"] == QUICK.step_s
    assert policy.keywords["most_tokens"]() == 8
    assert config["seed"] == 3
    assert config["reward_model"]["judge"]["pattern"] == r"(\d)\d"


def test_runs_are_alike_if_each_step_is() -> None:
    metrics = (
        "sampling/waves",
        "response_length/mean",
        "response_length/max",
        "actor/pg_loss",
        "actor/grad_norm",
    )
    scores = ("critic/score/mean", "critic/score/min", "critic/score/max")
    step: dict[str, float] = dict.fromkeys((*metrics, *scores), 2.0)
    assert are_alike([step, step], [step, step])
    assert are_alike([step], [step | {"actor/grad_norm": 2.0001}])
    assert not are_alike([step], [step | {"actor/grad_norm": 2.001}])
    assert not are_alike([step], [step, step])


def test_aims_are_judged_against_the_best_of_each_kind() -> None:
    split = ROW | {"run": "split 1 + 1 + 2", "seconds": 200.0, "idle_percent": 60.0}
    static = ROW | {"run": "static 2 + 2", "seconds": 100.0, "idle_percent": 35.0}
    worse = static | {"run": "static 1 + 3", "idle_percent": 50.0}
    moves, *idle, seconds = check_aims([split, worse, static, ROW])
    assert "each way (met)" in moves
    assert [line.partition(":")[0] + line.partition(":")[2] for line in idle] == [
        "aim dynamic idles less than split: 30.0% to 60.0% (split 1 + 1 + 2; met)",
        "aim dynamic idles less than static: 30.0% to 35.0% (static 2 + 2; met)",
    ]
    assert "1.25 times" in seconds
    moves, idle, _ = check_aims([static | {"idle_percent": 20.0}, ROW | {"moved_to_judge": 0}])
    assert "each way (not met)" in moves
    assert "(static 2 + 2; not met)" in idle
