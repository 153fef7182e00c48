"""`gcore-llm train` on a Ray cluster of its own: the same run as in one process, whatever dies on the way."""

import asyncio
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from command_line import (
    Cli,
    Command,
    assert_same_metrics,
    option_set,
    read_rows,
    step_rows,
    val_rows,
)
from process_tree import descendants, left_after
from ray.cluster_utils import Cluster

from gcore_ckpt import Checkpointer
from gcore_controller import RankError, make_announcer
from gcore_controller.rlhf.events import Event
from gcore_controller.runtimes.ray import RayTrainerGroup
from gcore_llm.config import TrainConfig
from gcore_llm.learning.trainer_worker import ray_trainer_spec
from gcore_llm.sections import TrainerConfig

pytestmark = pytest.mark.slow

NUM_KILLS = int(os.environ.get("GCORE_CHAOS_KILLS", "3"))
"""In the run that is disturbed; more of them make it longer."""

TITLES = {
    "controller": "ray::ControllerActor",
    "engine": "ray::EngineActor",
    "training rank": "ray::TrainingRank",
}

# Every process notes what it scores.
REWARD = """
import os
from pathlib import Path


def reward(prompt, completion, row):
    with Path(f"scored-{os.getpid()}").open("a") as file:
        print(repr((prompt, completion)), file=file)
    return sum(ord(c) % 2 == 0 for c in completion) / max(len(completion), 1)
"""


def scored(cli: Cli) -> list[str]:
    """What the runs since the last call have scored, in no order."""
    files = list(cli.cwd.glob("scored-*"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    for file in files:
        file.unlink()
    return sorted(lines)


def reporting(cli: Cli, args: list[str]) -> list[str]:
    (cli.cwd / "noting.py").write_text(REWARD)
    return option_set(args, "--reward", "noting.py:reward")


def test_controllers_everywhere_train_alike(cli: Cli, own_args: list[str]) -> None:
    """One in this process, and two actors, with an engine each, on two training ranks."""
    args = [*reporting(cli, own_args), "--actor.loss.kl-loss-coef", "0.1"]
    samples: dict[str, list[str]] = {}
    for name, options in {
        "one": [],
        # Engines with room for one prompt: an idle controller takes others'.
        "ray": [
            *("--runtime", "ray", "--controllers", "2", "--trainer.num-processes", "2"),
            *("--rollout.max-num-seqs", "4"),
        ],
    }.items():
        assert cli(*args, *options, "--name", name).code == 0
        samples[name] = scored(cli)
    assert len(samples["one"]) > 2 * 8 * 4
    # Each process tries the reward once, on nothing.
    tries = {
        name: [line for line in lines if line.endswith(", '')")] for name, lines in samples.items()
    }
    made = {
        name: [line for line in lines if line not in tries[name]] for name, lines in samples.items()
    }
    assert made["one"] == made["ray"]
    assert_same_metrics(cli.cwd / "runs/ray", cli.cwd / "runs/one")
    last = step_rows(cli.cwd / "runs/ray")[-1]
    assert 0 < last["controller/load/mean"] <= last["controller/load/max"]
    logs = {path.name for path in (cli.cwd / "runs/ray/logs").iterdir()}
    assert {"main.log", "controller-1.log", "engine-1.log", "trainer-1.log"} <= logs
    expected = {f"engine {i}": {"gen", "sync"} for i in range(2)}
    expected |= {f"trainer {i}": {"prepare", "train", "sync"} for i in range(2)}
    for row in read_rows(cli.cwd / "runs/ray/spans.jsonl"):
        assert {
            name: {stage for stage, *_ in spans} for name, spans in row["devices"].items()
        } == expected


def test_a_run_continues_with_other_controllers(cli: Cli, own_args: list[str], tiny: Path) -> None:
    """Saved with four controllers in one process, resumed with two on a cluster, which ask one engine of a judge.

    Adapters are trained, and alone sent to the engines of two ranks.
    """
    judge = [
        "--reward-model.kind",
        "judge",
        "--reward-model.path",
        str(tiny),
        "--reward-model.judge.pattern",
        r"(\d)",
    ]
    options = [
        "--reward-model.judge.max-response-length",
        "24",
        "--reward-model.judge.unparsable-score",
        "0.25",
    ]
    two = [*own_args, *judge, *options, "--trainer.test-freq", "2", "--actor.lora-rank", "4"]
    four = option_set(two, "--trainer.total-training-steps", "4")
    cli.ok(*four, "--name", "alone")
    cli.ok(*two, "--controllers", "4", "--name", "moved")
    ray = [
        "--runtime",
        "ray",
        "--controllers",
        "2",
        "--trainer.num-processes",
        "2",
        "--ray.weight-sync",
        "delta",
    ]
    finished = cli(*four, *ray, "--name", "moved")
    assert finished.code == 0, finished
    assert "resuming after step 2 of 4" in finished.out
    assert_same_metrics(cli.cwd / "runs/moved", cli.cwd / "runs/alone")
    logs = {path.name for path in (cli.cwd / "runs/moved/logs").iterdir()}
    assert {"judge-0.log", "engine-1.log"} <= logs
    assert "judge-1.log" not in logs


def kills(command: Command, run: Path, *, seed: int) -> Iterator[str]:
    """Kill processes of all kinds at random moments, the next one when a step has been made since; their kinds."""
    rng = random.Random(seed)
    kinds = [kind for _ in range(NUM_KILLS) for kind in TITLES][:NUM_KILLS]
    rng.shuffle(kinds)
    for kind in kinds:
        before = len(step_rows(run)) if (run / "metrics.jsonl").exists() else 0
        while not command.has_ended() and (
            not run.joinpath("metrics.jsonl").exists() or len(step_rows(run)) <= before
        ):
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 0.3))
        found = descendants(command.pid, TITLES[kind])
        if command.has_ended() or not found:
            return
        os.kill(rng.choice(found), signal.SIGKILL)
        yield kind


def test_stopped_processes_are_named_and_replaced(cli: Cli, own_args: list[str]) -> None:
    """A rank and then a controller; the run continues, and the first step takes longer than the timeout."""
    args = option_set(own_args, "--trainer.total-training-steps", "7")
    args += ["--trainer.save-freq", "1", "--trainer.heartbeat-timeout-s", "8"]
    sizes = ["--controllers", "2", "--trainer.num-processes", "2"]
    command = cli.start(*args, "--runtime", "ray", *sizes)
    run = cli.cwd / "runs/default"
    messages: list[str] = []
    for kind, where, remedy, step in (
        ("training rank", r"\w+", "all training ranks were started again", 2),
        ("controller", "the program", "another one takes over its share", 4),
    ):
        command.wait_for_steps(run, step)
        [_, stopped] = descendants(command.pid, TITLES[kind])
        os.kill(stopped, signal.SIGSTOP)
        start_s = time.monotonic()
        command.wait_until(lambda remedy=remedy: remedy in command.out)
        assert 7.0 < time.monotonic() - start_s < 120.0
        state = f"it is stopped on {socket.gethostname()}, by /proc/{stopped}/stat; its log is {run}/logs/"
        messages.append(
            rf"^{kind} \d, process {stopped} on [\d.]+, gave no sign of life for 8 s in {where}: {state}"
        )
    finished = command.wait()
    assert finished.code == 0, finished
    for message in messages:
        assert re.search(message, finished.out, flags=re.MULTILINE), finished.out
    assert [row["step"] for row in step_rows(run)] == [1, 2, 3, 4, 5, 6, 7]


def test_every_prompt_is_trained_on_once_despite_kills(cli: Cli, own_args: list[str]) -> None:
    """New weights are sent as changes, of which an engine that is replaced has none."""
    # Slowly: rounding differs with who computed what, and a policy that is nearly certain makes much of it.
    args = option_set(own_args, "--actor.optim.lr", "1e-4")
    args = option_set(args, "--trainer.total-training-steps", str(3 * NUM_KILLS))
    args = [
        *args,
        "--trainer.save-freq",
        "1",
        "--trainer.test-freq",
        "1000",
        "--trainer.tensorboard",
        "False",
    ]
    cli.ok(*args, "--name", "undisturbed")
    sizes = ["--controllers", "2", "--trainer.num-processes", "2"]
    command = cli.start(*args, "--runtime", "ray", *sizes, "--ray.weight-sync", "delta")
    run = cli.cwd / "runs/default"
    killed = list(kills(command, run, seed=0))
    processes = [pid for title in TITLES.values() for pid in descendants(command.pid, title)]
    finished = command.wait()
    assert finished.code == 0, finished
    assert len(killed) == NUM_KILLS
    assert "raylet" not in finished.out + finished.err
    # Engines are replaced while the run continues.
    announced_losses = re.findall(
        r"^(controller|training rank) \d+, process \d+ on [\d.]+, died: "
        r".*; (?:continuing after step \d+|another loss came before everything was replaced)$",
        finished.out,
        flags=re.MULTILINE,
    )
    assert sorted(announced_losses) == sorted(kind for kind in killed if kind != "engine"), (
        finished.out
    )
    # One that is killed while controllers are replaced, too, may have no client that could say so.
    announced = re.findall(
        r"^engine \d+ is gone: engine actor, process \d+ on \S+, died: .*; a replacement is being started$",
        finished.out,
        flags=re.MULTILINE,
    )
    assert len(announced) == len(
        re.findall(r"^engine \d+ is gone", finished.out, flags=re.MULTILINE)
    )
    assert len(announced) <= killed.count("engine")
    log = (run / "logs/main.log").read_text()
    assert len(re.findall(r"process \d+ on [\d.]+, died: .*", log)) >= len(announced_losses)
    assert_same_metrics(run, cli.cwd / "runs/undisturbed")
    assert [row["step"] for row in val_rows(run)] == [0, 3 * NUM_KILLS]
    assert not left_after(processes, 60.0)


async def test_announcements_of_controllers() -> None:
    """They reach the process of the run without being waited for; if that is gone, they are in the log alone."""
    sent: list[Event] = []

    async def send(event: Event) -> None:
        sent.append(event)
        if len(sent) > 1:
            raise ConnectionError("the run has ended")

    announce = make_announcer(send)
    announce("engine 1 is gone")
    announce("engine 2 is gone")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sent == [f"engine {i} is gone" for i in (1, 2)]


@pytest.fixture
def own_cluster() -> Iterator[None]:
    """One of this process."""
    cluster = Cluster()
    cluster.add_node(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.usefixtures("own_cluster")
def test_a_rank_that_dies_in_a_save_is_named(tiny: Path, tmp_path: Path) -> None:
    """While the other one, which is asked first, waits for it; so is one that is stopped for good."""
    ranks = TrainerConfig(num_processes=2, heartbeat_timeout_s=8.0)
    config = TrainConfig(device="cpu", dtype="float32", threads=2, runtime="ray", trainer=ranks)
    spec = ray_trainer_spec(config, tiny, tmp_path / "checkpoints")
    learner = RayTrainerGroup()

    def start() -> None:
        asyncio.run(learner.start(spec, num_cpus=1.0, num_gpus=0.0, timeout_s=600.0))

    start()
    place = learner.ranks.locations[1]
    pid = int(place.split()[1])
    os.kill(pid, signal.SIGSTOP)
    killer = threading.Timer(1.0, os.kill, (pid, signal.SIGKILL))
    killer.start()
    died = rf"training rank 1, {place}, died: .*; {tmp_path}/logs/trainer-1.log ends with: "
    try:
        with pytest.raises(RankError, match=died):
            learner.save(1, {"step": 1, "controllers": []})
    finally:
        killer.join()
        start()
    learner.save(1, {"step": 1, "controllers": []})
    learner.close()
    assert Checkpointer(tmp_path / "checkpoints").steps() == [1]
    start()
    place = learner.ranks.locations[1]
    os.kill(int(place.split()[1]), signal.SIGSTOP)
    with pytest.raises(RankError) as info:
        learner.save(2, {"step": 2, "controllers": []})
    problem = (
        f"gave no sign of life for 8 s in save: it is stopped on {socket.gethostname()}, by /proc/"
    )
    assert str(info.value).startswith(f"training rank 1, {place}, {problem}")
    assert str(info.value).endswith(f"; its log is {tmp_path}/logs/trainer-1.log")
    # Its place on the cluster is free again.
    start()
    learner.close()


BROKEN = """
import torch
import torch.distributed as dist

num_calls = 0

def broken(tokens, config):
    global num_calls
    num_calls += 1
    if num_calls > 1 and dist.get_rank() == 1:
        return tokens.advantages + torch.zeros(3, 5)
    return -tokens.advantages * tokens.ratio
"""


def test_an_error_of_a_loss_ends_the_run_at_once(cli: Cli, own_args: list[str]) -> None:
    """In one rank, for which the other one waits in a collective."""
    (cli.cwd / "own.py").write_text(BROKEN)
    loss = ["--actor.loss.loss-mode", f"{cli.cwd / 'own.py'}:broken", "--trainer.save-freq", "1"]
    finished = cli(*own_args, *loss, "--runtime", "ray", "--trainer.num-processes", "2")
    assert finished.code == 2, finished
    assert "training rank 1, process " in finished.err
    assert "in broken" in finished.err
    assert "must match the size of tensor" in finished.err
    assert "started again" not in finished.out
    assert Checkpointer(cli.cwd / "runs/default/checkpoints").steps() == [1]


def test_a_cluster_that_is_not_there(cli: Cli, own_args: list[str]) -> None:
    error = cli.refused(*own_args, "--runtime", "ray", "--ray.address", "127.0.0.1:1")
    assert "ray.address is '127.0.0.1:1': no Ray cluster answers there" in error
    assert not (cli.cwd / "runs").exists()


def test_a_variable_that_is_not_set(cli: Cli, own_args: list[str]) -> None:
    error = cli.refused(*own_args, "--runtime", "ray", "--ray.env", "NO_SUCH_KEY")
    assert (
        "ray.env holds 'NO_SUCH_KEY'; expected names of variables that are set for this command"
        in error
    )


def test_fewer_engines_than_controllers(cli: Cli, own_args: list[str]) -> None:
    options = ["--runtime", "ray", "--controllers", "3", "--rollout.num-processes", "2"]
    assert "rollout.num_processes is 2; expected controllers=3 or more" in cli.refused(
        *own_args, *options
    )


def test_an_interrupt_saves_the_last_step(cli: Cli, own_args: list[str]) -> None:
    """And the same command continues."""
    many = option_set(own_args, "--trainer.total-training-steps", "1000")
    command = cli.start(*many, "--runtime", "ray", "--trainer.tensorboard", "False")
    run = cli.cwd / "runs/default"
    command.wait_for_steps(run, 2)
    processes = [pid for title in TITLES.values() for pid in descendants(command.pid, title)]
    assert len(processes) == 3
    command.send(signal.SIGINT)
    assert command.wait().code == 130
    assert not left_after(processes, 60.0)
    num_steps = len(step_rows(run))
    assert Checkpointer(run / "checkpoints").steps() == [num_steps]
