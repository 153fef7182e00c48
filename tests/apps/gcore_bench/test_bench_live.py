"""The live part of the bench of placement: its engine, its tables; the runs are those of `--quick`."""

from functools import partial
from pathlib import Path

import pytest

from gcore_bench.harness.report import Row
from gcore_bench.placement.live import aims, run_options, table
from gcore_bench.placement.paced_engine import PacedEngine, phase_tokens
from gcore_placement.ledger import CAUSES
from gcore_rollout import HFEngine, Request, SamplingParams

OPTIONS = ("--rollout.num-processes", "--reward-model.judge.num-processes")

ROW: Row = {
    **{"strategy": "dynamic", "seconds": 80.0, "phase_s": [40.0, 40.0], "moved_to_judge": 1, "moved_to_policy": 2},
    **{"idle_share": 0.3, "shares": dict.fromkeys(CAUSES, 0.03), "is_alike": True, "load": 1.0},
}


async def sampled(engine: HFEngine) -> list[list[int]]:
    request = Request(
        request_id="a", prompt_token_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=12, temperature=1.0), n=3, seed=1
    )
    found = [completion async for completion in engine.generate([request])]
    return [c.token_ids.tolist() for c in sorted(found, key=lambda completion: completion.index)]


async def test_a_paced_engine_samples_the_same_but_for_lengths(tiny: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    engine = PacedEngine.paced(tiny, step_s=0.002, most_tokens=partial(phase_tokens, metrics, 2, (3, 12, 6)))
    plain = HFEngine.from_pretrained(tiny, eos_token_ids=())
    expected = await sampled(plain)
    lengths: list[int] = []
    found: list[list[int]] = []
    for step in range(7):
        found = await sampled(engine)
        lengths.append(len(found[0]))
        assert found == [tokens[: lengths[-1]] for tokens in expected]
        with metrics.open("a") as file:
            file.write(f'{{"step": {step}, "timing_s/step": 1.0}}\n{{"step": {step}, "val/x": 1.0}}\n')
    assert lengths == [3, 3, 12, 12, 6, 6, 6]
    await engine.sleep()
    await engine.wake()
    assert await sampled(engine) == found
    await plain.close()
    await engine.close()


def test_every_split_and_both_other_strategies_run() -> None:
    chosen = run_options(4)
    assert list(chosen) == ["colocated", "split 1 + 3", "split 2 + 2", "split 3 + 1", "dynamic"]
    assert list(run_options(2)) == ["colocated", "split 1 + 1", "dynamic"]
    assert list(run_options(2, ("dynamic", "colocated"))) == ["colocated", "dynamic"]
    assert chosen["split 3 + 1"][-4:] == ["--rollout.num-processes", "3", "--reward-model.judge.num-processes", "1"]


def test_aims_are_judged_against_the_best_of_the_others() -> None:
    split = ROW | {"strategy": "split 2 + 2", "seconds": 100.0, "idle_share": 0.35}
    moves, idle, seconds = aims([split, split | {"strategy": "colocated", "seconds": 120.0}, ROW])
    assert "each way (met)" in moves
    assert "30.0% to 35.0% (split 2 + 2; met)" in idle
    assert "1.25 times" in seconds
    moves, idle, _ = aims([split | {"idle_share": 0.2}, ROW | {"moved_to_judge": 0}])
    assert "each way (not met)" in moves
    assert "(split 2 + 2; not met)" in idle
    assert aims([split]) == aims([ROW]) == []


def test_the_table_shows_moves_of_the_dynamic_strategy_only() -> None:
    moves = table({"rows": [ROW, ROW | {"strategy": "colocated"}]}).columns[4]
    assert list(moves.cells) == ["1 + 2", "-"]


@pytest.mark.parametrize("num_devices", [2, 3])
def test_all_devices_are_used(num_devices: int) -> None:
    for name, options in run_options(num_devices).items():
        policy, judge = (int(options[options.index(option) + 1]) for option in OPTIONS)
        assert (policy, judge) == (num_devices,) * 2 if name == "colocated" else policy + judge == num_devices
