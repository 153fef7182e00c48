"""Steps on the machines of the ranks and in a slower place, while machines are lost with their disks."""

import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankServer
from waiting import wait_until

from gcore_ckpt import (
    Checkpointer,
    CheckpointNotFoundError,
    CheckpointWriteError,
    CorruptCheckpointError,
    Tier,
    TieredCheckpointer,
    verify,
)
from gcore_ckpt.tiers.machines import Machines
from gcore_ckpt.tiers.survey import whole_steps

HEARD_WITHIN_S = 60.0


def files(root: Path) -> dict[str, list[str]]:
    """The data files of each step in each place."""
    return {
        str(folder.relative_to(root)): sorted(file.name for file in folder.glob("*.safetensors"))
        for folder in sorted(root.glob("*/step-*"))
    }


def data(*ranks: int) -> list[str]:
    return [f"data-{rank:05d}.safetensors" for rank in ranks]


def test_each_machine_has_its_own_files_and_its_neighbours(
    rank_server: RankServer, tmp_path: Path
) -> None:
    pool = rank_server.shared()
    for steps in pool.run(
        "save_in_tiers", str(tmp_path), [3, 4, 5, 6], {"machines": [0, 0, 1, 1]}, size=4
    ):
        assert steps == [5, 6]
    whole = data(0, 1, 2, 3)
    places = [
        "machine-0/step-00000005",
        "machine-0/step-00000006",
        "machine-1/step-00000005",
        "machine-1/step-00000006",
    ]
    assert files(tmp_path) == dict.fromkeys([*places, "shared/step-00000005"], whole)
    for folder in ("machine-0", "machine-1", "shared"):
        verify(tmp_path / folder)  # with as many copies as that, each is a folder of whole steps

    root = tmp_path / "four"
    pool.run("save_in_tiers", str(root), [1], {}, size=4)
    assert files(root) == {
        f"machine-{i}/step-00000001": sorted(data(i, (i - 1) % 4)) for i in range(4)
    }


def test_a_lost_machine_is_completed_by_its_neighbour_for_any_number_of_ranks(
    rank_server: RankServer, tmp_path: Path
) -> None:
    rank_server.shared().run("save_in_tiers", str(tmp_path), [5, 6, 7], {}, size=4)
    shutil.rmtree(tmp_path / "machine-2")
    before = files(tmp_path)
    for size in (4, 6):
        assert (
            rank_server.shared(size).run("load_from_tiers", str(tmp_path), None, {}, size=size)
            == [(7, [5, 6, 7])] * size
        )
    assert files(tmp_path) == before, "loading changes nothing"
    # Without the neighbour, what is left is in the shared folder.
    shutil.rmtree(tmp_path / "machine-3")
    pool = rank_server.shared()
    assert pool.run("load_from_tiers", str(tmp_path), None, {}, size=4) == [(5, [5])] * 4
    assert pool.run("save_in_tiers", str(tmp_path), [6], {}, size=4) == [[5, 6]] * 4
    assert {len(names) for place, names in files(tmp_path).items() if "machine" in place} == {2}
    assert pool.run("load_from_tiers", str(tmp_path), 6, {}, size=4) == [(6, [5, 6])] * 4
    assert pool.run("load_from_tiers", str(tmp_path), 5, {}, size=4) == [(5, [5, 6])] * 4


def test_a_copy_that_is_damaged_is_an_error_on_all_ranks(
    rank_server: RankServer, tmp_path: Path
) -> None:
    pool = rank_server.shared()
    pool.run("save_in_tiers", str(tmp_path), [6, 7], {}, size=4)
    shutil.rmtree(tmp_path / "machine-2")
    copy = tmp_path / "machine-3" / "step-00000007" / "data-00002.safetensors"
    with copy.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\0" * 8)
    errors = pool.errors("load_from_tiers", str(tmp_path), None, {}, size=4)
    assert any(
        "CorruptCheckpointError" in error and "data-00002.safetensors: tensor 'rows' has" in error
        for error in errors
    )
    assert all("data-00002.safetensors" in error for error in errors)
    assert pool.run("load_from_tiers", str(tmp_path), 6, {}, size=4) == [(6, [6, 7])] * 4
    copy.unlink()
    assert pool.run("load_from_tiers", str(tmp_path), None, {}, size=4) == [(6, [6])] * 4


def test_a_rank_that_dies_while_others_read_from_it(
    rank_server: RankServer, tmp_path: Path
) -> None:
    with rank_server.pool(3) as pool:
        pool.run("save_in_tiers", str(tmp_path), [6], {}, size=3)
        shutil.rmtree(tmp_path / "machine-1")
        pool.start("die_while_others_read", str(tmp_path), 2, ranks=range(3))
        for outcome in pool.collect([0, 1], HEARD_WITHIN_S):
            assert "rank 2 of 3 died" in outcome["value"]


def resumed(log: Path) -> int:
    return int(log.read_text().split()[1])


def saved(log: Path) -> list[int]:
    """The steps whose save has returned."""
    return (
        [int(step) for step in re.findall(r"saved (\d+)\n", log.read_text())]
        if log.exists()
        else []
    )


@pytest.mark.parametrize("machines", [[0, 1, 2], [0, 2], [2, 3, 0, 0]])
def test_a_machine_lost_in_training_costs_at_most_one_step(
    rank_server: RankServer, tmp_path: Path, machines: list[int]
) -> None:
    log, again = tmp_path / "log", tmp_path / "again"
    with rank_server.pool(3) as pool:
        pool.start("train_in_tiers", str(tmp_path), str(log), {"every": 1000}, ranks=range(3))
        wait_until(lambda: len(saved(log)) > 3)
        pool.kill(1)
        shutil.rmtree(tmp_path / "machine-1")
        for outcome in pool.collect([0, 2], HEARD_WITHIN_S):
            assert "rank 1 of 3 died" in outcome["error"]
    size = len(machines)
    with rank_server.pool(size) as pool:
        pool.start(
            "train_in_tiers",
            str(tmp_path),
            str(again),
            {"every": 1000, "machines": machines},
            ranks=range(size),
        )
        wait_until(lambda: len(saved(again)) > 2)
    assert saved(log)[-1] - 1 <= resumed(again) <= saved(log)[-1] + 1


def kills(rank_server: RankServer, root: Path, number: int, seed: int) -> None:
    """Ends one rank or all, at random moments, and takes a machine away; a group on what is left and more resumes."""
    rng = random.Random(seed)
    current, reached = {0, 1, 2}, 0
    for kill in range(number):
        machines = [*current, rng.choice([*current])]
        rng.shuffle(machines)
        size, log = len(machines), root / f"log-{kill}"
        with rank_server.pool(size) as pool:
            options = {"every": 3, "machines": machines}
            pool.start("train_in_tiers", str(root), str(log), options, ranks=range(size))
            wait_until(log.exists if kill % 3 == 0 else lambda: len(saved(log)) >= 2)  # noqa: B023
            time.sleep(rng.uniform(0.0, 0.1))
            killed = rng.choice([[rng.randrange(size)], range(size)])
            for rank in killed:
                pool.kill(rank, rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
            time.sleep(rng.choice([0.0, 0.2]))  # then whatever started the group kills the rest
        assert "wrong" not in log.read_text()
        assert resumed(log) >= reached - 1, f"kill {kill} has lost more than a step"
        reached = max([resumed(log), *saved(log)])
        if len(saved(log)) >= 2 and rng.random() < 0.7:  # by then all files have their copies again
            lost = machines[killed[0]]
            current.discard(lost)
            if rng.random() < 0.7:
                shutil.rmtree(root / f"machine-{lost}")
        others = [machine for machine in range(4) if machine not in current]
        if len(current) < 2 or (others and rng.random() < 0.5):
            current.add(
                rng.choice(others)
            )  # an empty machine, or one that comes back with steps of long ago


def test_kills_at_random_moments(rank_server: RankServer, tmp_path: Path) -> None:
    kills(rank_server, tmp_path, 10, seed=0)


@pytest.mark.slow
def test_many_kills_at_random_moments(rank_server: RankServer, tmp_path: Path) -> None:
    kills(rank_server, tmp_path, int(os.environ.get("GCORE_CKPT_KILLS", "20")), seed=1)


@pytest.mark.parametrize(
    ("moment", "dying", "possible"),
    [
        ("writing", [1], {4}),
        ("copying", [1], {4}),
        (
            "committing",
            [1],
            {5},
        ),  # its files lie next to an index on the machine that has the copies
        ("committing", [1, 2], {4}),  # and here they do not
        ("committed", [1], {5}),
    ],
)
def test_a_death_in_each_part_of_a_save(
    rank_server: RankServer, tmp_path: Path, moment: str, dying: list[int], possible: set[int]
) -> None:
    survivors = [rank for rank in range(3) if rank not in dying]
    with rank_server.pool(3) as pool:
        pool.start("die_in_save", str(tmp_path), moment, dying, {"every": 1000}, ranks=range(3))
        for outcome in pool.collect(survivors, HEARD_WITHIN_S):
            assert f"rank {dying[0]} of 3 died" in outcome["value"]
    for lost in ("nothing", f"machine-{dying[0]}"):
        shutil.rmtree(tmp_path / lost, ignore_errors=True)
        with rank_server.pool(3) as pool:
            loaded = {
                step for step, _ in pool.run("load_from_tiers", str(tmp_path), None, {}, size=3)
            }
        assert loaded == possible


def test_a_copy_that_cannot_be_written_fails_the_save_on_all_ranks(
    rank_server: RankServer, tmp_path: Path
) -> None:
    for rank, heard in enumerate(
        rank_server.shared().run("save_while_one_disk_is_full", str(tmp_path), 2, size=4)
    ):
        assert heard == [
            "",
            f"saving step 2 to {tmp_path}/machine-{rank} failed: {heard[1].partition('failed: ')[2]}",
            "",
        ]
        assert "no space left" in heard[1]
    assert not list(tmp_path.glob("*/.tmp-*"))


def test_going_back_in_all_tiers(rank_server: RankServer, tmp_path: Path) -> None:
    assert (
        rank_server.shared().run("go_back_in_tiers", str(tmp_path), size=4)
        == [([6, 7], [5, 6])] * 4
    )
    assert len(list(tmp_path.glob("machine-*/set-aside-*"))) == 8


def test_one_process_has_tiers_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiers = [
        Tier(tmp_path / "fast", every=2, keep=1),
        Tier(tmp_path / "slow", every=3),
        Tier(tmp_path / "rare", every=9),
    ]
    with TieredCheckpointer(tiers) as checkpointer:
        for step in range(1, 11):
            checkpointer.save(step, {"step": step, "x": torch.full((100_000,), step)}).wait()
        checkpointer.wait()
        assert [Checkpointer(tier.path).steps() for tier in tiers] == [[10], [3, 6, 9], [9]]
        checkpointer.save(11, {"step": 11}, to_all=True)
        checkpointer.wait()
        assert checkpointer.steps() == [3, 6, 9, 11]
        with caplog.at_level("INFO"):
            assert checkpointer.load()["step"] == 11
        assert f"step 11 is loaded from {tmp_path}/fast; the newest steps are " in caplog.text
        assert torch.equal(checkpointer.load(step=6)["x"], torch.full((100_000,), 6))
        with pytest.raises(
            CheckpointNotFoundError,
            match=r"hold no step 4; their committed steps are \[3, 6, 9, 11\]",
        ):
            checkpointer.load(step=4)
    for tier in tiers:
        verify(tier.path)
    with (
        TieredCheckpointer(tiers) as checkpointer,
        pytest.raises(CheckpointWriteError, match="step is 2; expected more"),
    ):
        checkpointer.save(2, {})


def test_a_slow_tier_that_fails_is_reported_and_the_step_stays_in_the_fast_one(
    tmp_path: Path,
) -> None:
    with TieredCheckpointer(
        [Tier(tmp_path / "fast"), Tier(tmp_path / "slow", every=2)]
    ) as checkpointer:
        checkpointer.save(1, {"step": 1}).wait()
        (tmp_path / "slow").rename(tmp_path / "elsewhere")
        checkpointer.save(2, {"step": 2}).wait()
        with pytest.raises(
            CheckpointWriteError, match=f"step 2 is committed to {tmp_path}/fast, but copying it to"
        ):
            checkpointer.wait()
        assert checkpointer.load()["step"] == 2


def test_what_a_dead_run_has_not_copied_is_copied_by_the_next(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "fast") as checkpointer:  # as after a death before any copy
        for step in range(1, 6):
            checkpointer.save(step, {"step": step})
    with TieredCheckpointer(
        [Tier(tmp_path / "fast", keep=1), Tier(tmp_path / "slow", every=2)]
    ) as checkpointer:
        checkpointer.save(7, {"step": 7})
    assert Checkpointer(tmp_path / "slow").steps() == [4]
    assert Checkpointer(tmp_path / "slow").load()["step"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every is 0; expected 1 or more"),
        ({"keep": 0}, "keep is 0; expected None"),
        ({"replicas": -1}, "replicas is -1; expected None"),
        (
            {"path": "s3://bucket/run", "replicas": 1},
            "replicas is 1 and path is s3://bucket/run; expected a folder",
        ),
    ],
)
def test_tiers_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Tier(arguments.pop("path", "folder"), **arguments)


def test_lists_of_tiers_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="tiers is empty; expected one or more"):
        TieredCheckpointer([])
    with pytest.raises(ValueError, match="a tier after the first has replicas"):
        TieredCheckpointer([Tier("a"), Tier("b", replicas=1)])


@pytest.mark.parametrize(
    "names", [["a"], ["a", "b"], ["a", "a", "b", "b"], ["a", "b", "a", "c", "c", "c"]]
)
def test_every_file_gets_to_the_next_machines(names: list[str]) -> None:
    machines = Machines(names)
    for distance in range(1, len(machines.ranks)):
        targets = [machines.target(rank, distance) for rank in range(len(names))]
        assert all(names[rank] != names[target] for rank, target in enumerate(targets))
        for rank in range(len(names)):
            assert machines.sources(rank, distance) == [
                source for source, target in enumerate(targets) if target == rank
            ]


def test_parts_of_two_attempts_are_no_step() -> None:
    def part(index: str, saved_at: str, here: list[str], missing: list[str]) -> dict[str, Any]:
        return {
            "index": index,
            "saved_at": saved_at,
            "files": dict.fromkeys(here, 1),
            "missing": missing,
        }

    one = part("first", "2026-01-01", ["a"], ["b"])
    other = part("second", "2026-01-02", ["b"], ["a"])
    assert whole_steps([{"7": one}, {"7": other}]) == {}
    assert list(whole_steps([{"7": one}, {"7": part("first", "2026-01-01", ["b"], ["a"])}])) == [7]
    both = [
        {"7": part("first", "2026-01-01", ["a", "b"], [])},
        {"7": part("second", "2026-01-02", ["a", "b"], [])},
    ]
    assert whole_steps(both)[7] == ("second", {"a": (1, [1]), "b": (1, [1])})


@pytest.mark.parametrize("file", ["data-00000.safetensors", "index.json"])
def test_a_damaged_copy_is_replaced_by_that_of_the_next_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    tiers = [Tier(fast), Tier(slow, every=2)]
    with TieredCheckpointer(tiers, process_group=None) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": torch.arange(1000) * step})
    for step in (1, 2):
        flip_last_bit(fast / f"step-0000000{step}" / file)
    loading = TieredCheckpointer(tiers, process_group=None)
    template = {"x": torch.zeros(1000, dtype=torch.int64)}
    loading.load(template)
    assert torch.equal(template["x"], torch.arange(1000) * 2)
    warning = caplog.messages[-1]
    assert (
        f"step 2 of {fast} is damaged, and is loaded from {slow}: {fast}/step-00000002/{file}"
        in warning
    )
    with pytest.raises(CorruptCheckpointError, match=f"{fast}/step-00000001/{file}"):
        loading.load(step=1)
    flip_last_bit(slow / "step-00000002" / file)
    with pytest.raises(CorruptCheckpointError, match=f"{slow}/step-00000002/{file}"):
        loading.load()


@pytest.mark.parametrize("file", ["data-00000.safetensors", "index.json"])
def test_a_damaged_step_is_not_copied_to_the_next_tier(tmp_path: Path, file: str) -> None:
    with Checkpointer(tmp_path / "fast") as saver:  # as after a death before any copy
        saver.save(2, {"x": torch.arange(1000)})
    flip_last_bit(tmp_path / "fast/step-00000002" / file)
    checkpointer = TieredCheckpointer([Tier(tmp_path / "fast"), Tier(tmp_path / "slow", every=2)])
    checkpointer.save(3, {"step": 3})
    with pytest.raises(
        CheckpointWriteError, match=rf"copying it to .* {tmp_path}/fast/step-00000002/{file}"
    ):
        checkpointer.close()
    assert Checkpointer(tmp_path / "slow").steps() == []


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


def test_the_best_steps_stay_in_a_tier_and_delete_is_for_all(tmp_path: Path) -> None:
    tiers = [
        Tier(tmp_path / "fast", keep=1, replicas=0),
        Tier(tmp_path / "slow", keep=1, keep_best=1, best_mode="min"),
    ]
    with TieredCheckpointer(tiers, process_group=None) as checkpointer:
        for step, metric in enumerate((0.5, 0.1, 0.7, 0.9)):
            checkpointer.save(step, step, metric=metric)
        checkpointer.wait()
        assert checkpointer.steps() == [1, 3]
        assert Checkpointer(tmp_path / "fast", process_group=None).steps() == [3]
        checkpointer.delete(3)
        assert checkpointer.steps() == [1]
        with pytest.raises(CheckpointNotFoundError, match="holds no step 3 to delete"):
            checkpointer.delete(3)
