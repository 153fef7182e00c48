"""`gcore-llm train` whose trainer and engine take turns on their device, and its plan of a GPU's memory."""

from pathlib import Path

import pytest
import torch
from command_line import Cli, assert_same_metrics, metrics_of, option_set, read_rows, step_rows

from gcore_ckpt import Checkpointer, load
from gcore_placement import Ledger, read_spans
from gcore_runs.inputs import count_parameters

CHECKPOINTED = "gradient checkpointing of {} of the layers, as few as fit (actor.enable_gradient_checkpointing auto)"
JUDGE = ["--reward-model.kind", "judge", "--reward-model.judge.max-response-length", "4"]
UNREADABLE = ["--reward-model.judge.unparsable-score", "0"]
ALL_MODELS = [
    *("--algorithm.adv-estimator", "gae", "--algorithm.kl-ctrl.kl-coef", "0.01"),
    *("--algorithm.old-log-probs", "trainer"),
]
DISTURBED = """
import os, signal
from pathlib import Path

num_calls = 0

def reward(prompt, completion, row):
    global num_calls
    num_calls += 1
    if num_calls == 60 and Path("ACTION").exists():
        if Path("ACTION").read_text() == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        else:
            raise ValueError("enough")
    return sum(ord(c) % 2 == 0 for c in completion) / max(len(completion), 1)
"""


def run_both(cli: Cli, args: list[str], *, says_nothing: bool = True) -> tuple[Path, Path]:
    """Run without turns, and then with turns."""
    for name, turns in {"apart": "false", "together": "true"}.items():
        finished = cli(*args, "--name", name, "--rollout.colocated", turns)
        assert finished.code == 0, finished
        assert not (says_nothing and finished.err), finished
    return cli.cwd / "runs/apart", cli.cwd / "runs/together"


def assert_same_runs(run: Path, expected: Path) -> None:
    """The metrics and the export are the same to the bit."""
    assert metrics_of(run) == metrics_of(expected)
    exported: list[dict[str, bytes]] = []
    for folder in (run, expected):
        files = sorted((folder / "export").glob("*.safetensors"))
        exported.append({file.name: file.read_bytes() for file in files})
    assert exported[0] == exported[1] != {}


def assert_same(cli: Cli, args: list[str], *, says_nothing: bool = True) -> list[dict[str, float]]:
    """Run without turns, and then with turns, to the same end. Return the metrics of the steps."""
    apart, together = run_both(cli, args, says_nothing=says_nothing)
    assert_same_runs(together, apart)
    return step_rows(together)


def test_the_same_run_by_turns(cli: Cli, own_args: list[str]) -> None:
    """With two controllers and a checkpoint after each step, which finds the models awake."""
    args = [*option_set(own_args, "--trainer.total-training-steps", "3"), "--controllers", "2"]
    rows = assert_same(cli, [*args, "--trainer.save-freq", "1", "--trainer.test-freq", "2"])
    assert all(row["timing_s/swap"] > 0 for row in rows)
    ledger = Ledger.of(read_spans(cli.cwd / "runs/together"))
    # One device, on which all of them are.
    [work] = ledger.device_ns.values()
    assert all(
        work[column] > 0
        for column in ("generation", "preparation", "training", "weight_sync", "swap")
    )
    assert Ledger.of(read_spans(cli.cwd / "runs/apart")).device_ns.keys() == {"engine", "trainer"}


def test_with_reference_critic_and_judge(cli: Cli, own_args: list[str], tiny: Path) -> None:
    assert_same(
        cli, [*own_args, *ALL_MODELS, *JUDGE, *UNREADABLE, "--reward-model.path", str(tiny)]
    )


@pytest.mark.slow
def test_by_turns_with_vllm(vllm_cli: Cli, own_args: list[str]) -> None:
    """Its keys and values are freed at each turn, so that no prefix may be looked for there."""
    args = [
        *option_set(own_args, "--trainer.total-training-steps", "3"),
        "--rollout.engine",
        "vllm",
    ]
    # vLLM says one thing and another on stderr as it starts.
    assert_same(vllm_cli, [*args, "--trainer.test-freq", "2"], says_nothing=False)


@pytest.mark.slow
def test_processes_by_turns(cli: Cli, own_args: list[str]) -> None:
    """Two ranks and an engine, each in a process of its own, with a checkpoint after each step."""
    args = [
        *own_args,
        "--trainer.num-processes",
        "2",
        "--rollout.num-processes",
        "1",
        "--trainer.save-freq",
        "1",
    ]
    apart, together = run_both(cli, args)
    rows, expected = metrics_of(together), metrics_of(apart)
    assert len(rows) == len(expected) > 2
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-6, abs=1e-6)
    assert all(row["timing_s/swap"] > 0 for row in step_rows(together))
    found, exported = (load(run / "export") for run in (together, apart))
    assert found.keys() == exported.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_megatron_ranks_by_turns(cli: Cli, own_args: list[str]) -> None:
    """Two tensor parallel ranks and an engine in a process of its own, with a checkpoint after each step."""
    size = ["--trainer.num-processes", "2", "--trainer.parallel.tensor-model-parallel-size", "2"]
    args = [*own_args, "--trainer.backend", "megatron", *size, "--rollout.num-processes", "1"]
    args = [*args, "--trainer.save-freq", "1", "--algorithm.old-log-probs", "trainer"]
    rows = assert_same(cli, args, says_nothing=False)
    assert all(row["timing_s/swap"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["split", "colocated"])
def test_turns_on_a_cluster(cli: Cli, own_args: list[str], tiny: Path, strategy: str) -> None:
    """Ranks on the devices of two engines and a judge (split), or of two engines with a judge each, and on one more."""
    args = [
        *own_args,
        *JUDGE,
        *UNREADABLE,
        "--reward-model.path",
        str(tiny),
        "--trainer.save-freq",
        "1",
    ]
    cli.ok(*args, "--name", "alone")
    sizes = ["--controllers", "2", "--rollout.num-processes", "2", "--trainer.num-processes", "3"]
    options = [
        "--runtime",
        "ray",
        *sizes,
        "--placement.strategy",
        strategy,
        "--rollout.colocated",
        "true",
    ]
    finished = cli(*args, *options, "--name", "turns")
    assert finished.code == 0, finished
    assert_same_metrics(cli.cwd / "runs/turns", cli.cwd / "runs/alone")
    rows = read_rows(cli.cwd / "runs/turns/spans.jsonl")
    places = (
        [f"device {i}" for i in range(3)]
        if strategy == "split"
        else ["device 0", "device 1", "trainer 2"]
    )
    for row in rows:
        assert sorted(row["devices"]) == places
        for name, spans in row["devices"].items():
            stages = {stage for stage, *_ in spans}
            assert stages >= {"prepare", "train", "sync", "swap"}
            assert ("gen" in stages or "reward" in stages) == name.startswith("device")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [[], [*ALL_MODELS, "--actor.offload", "all"]],
    ids=["actor", "all models, one at a time"],
)
def test_what_ends_a_turn_of_sampling_costs_no_step(
    cli: Cli, own_args: list[str], options: list[str]
) -> None:
    """An error of the reward, and Ctrl-C in it, while the trainer is asleep: the step before is saved."""
    (cli.cwd / "disturbed.py").write_text(DISTURBED)
    args = option_set(own_args, "--reward", f"{cli.cwd / 'disturbed.py'}:reward")
    args = [
        *option_set(args, "--trainer.total-training-steps", "3"),
        "--rollout.colocated",
        "true",
        *options,
    ]
    cli.ok(*args, "--name", "whole")
    for action, code in (("interrupt", 130), ("error", 2)):
        (cli.cwd / "ACTION").write_text(action)
        run, own = (
            cli.cwd / "runs" / action,
            [*args, "--name", action, "--trainer.save-freq", "100"],
        )
        finished = cli(*own)
        assert finished.code == code, finished
        assert [row["step"] for row in step_rows(run)] == [1]
        assert Checkpointer(run / "checkpoints").steps() == [1]
        (cli.cwd / "ACTION").unlink()
        assert "resuming after step 1 of 3" in cli.ok(*own)
        assert_same_runs(run, cli.cwd / "runs/whole")


@pytest.mark.slow
def test_one_model_at_a_time_by_turns(cli: Cli, own_args: list[str]) -> None:
    """Models that come to the device alone, with a checkpoint after each step: as without turns."""
    args = [*own_args, *ALL_MODELS, "--actor.offload", "all", "--trainer.save-freq", "1"]
    assert_same(cli, args)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--trainer.schedule", "async"],
            "false with trainer.schedule 'async', which samples while it trains",
        ),
        (
            ["--trainer.schedule", "one_step_off"],
            "false with trainer.schedule 'one_step_off', which samples while it",
        ),
    ],
)
def test_turns_are_refused(
    cli: Cli, own_args: list[str], options: list[str], expected: str
) -> None:
    error = cli.refused(*own_args, "--rollout.colocated", "true", *options)
    assert f"rollout.colocated is true; expected {expected}" in error
    assert not (cli.cwd / "runs").exists()


SERVERS = (
    "--rollout.engine",
    "vllm_server",
    "--rollout.urls",
    "http://127.0.0.1:1",
    "--rollout.engine-options.weights_dir",
    "/tmp",
)


def dry_run(cli: Cli, model: Path, *options: str) -> str:
    return cli.ok("train", "--model", str(model), "--dry-run", *options)


def test_a_dry_run_prints_who_is_where(cli: Cli, tiny: Path) -> None:
    """Nothing is loaded, and nothing is written."""
    count = count_parameters(tiny)
    roles = [
        "--algorithm.adv-estimator",
        "gae",
        "--actor.loss.kl-loss-coef",
        "0.1",
        "--trainer.num-processes",
        "2",
    ]
    judge = [
        "--reward-model.kind",
        "judge",
        "--reward-model.path",
        str(tiny),
        "--rollout.engine",
        "vllm",
    ]
    out = dry_run(cli, tiny, "--dry-run-device", "H100", "--dtype", "float32", *roles, *judge)
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in out.splitlines()
        if line.startswith("│")
    ]
    stages = ["generate", "prepare", "train", "sync"]
    assert [row[0] for row in rows if row[3].endswith("%")] == stages
    places = {row[0]: row[1] for row in rows if row[0] and row[0] not in stages}
    assert places["policy engine"] == "vllm on GPU 0"
    assert places["trainer"] == places["critic"] == places["reference"] == "torch on GPU 0 to 1"
    assert places["judge"] == "hf on GPU 0"
    # Both ranks have half of the weights and gradients, and of the moments; the engine has all weights.
    found = {(row[2], row[3]) for row in rows}
    assert {
        ("weights", f"{4 * count:,}"),
        ("weights", f"{2 * count:,}"),
        ("optimizer", f"{4 * count:,}"),
    } <= found
    assert "73.6 of 80.0 GB to plan with" in out
    assert "trainer and engine are in it side by side" in out
    assert out.splitlines()[-1] == "fits"
    assert [*cli.cwd.iterdir()] == []


def test_a_dry_run_says_what_would_fit(cli: Cli, tiny: Path) -> None:
    """A GPU that holds the engine and little else: the run is refused with the numbers, after the same tables."""
    options = [
        "--dry-run-device",
        "2.2",
        "--actor.ppo-max-token-len",
        "400000",
        "--dtype",
        "float32",
    ]
    options = [*options, "--actor.enable-gradient-checkpointing", "false"]
    finished = cli("train", "--model", str(tiny), "--dry-run", *options)
    assert finished.code == 2
    assert finished.out.splitlines()[-1] == "does not fit"
    error = finished.err
    assert (
        f"gcore-llm: error: model is {str(tiny)!r} (0.00 B parameters), whose stage 'train' needs"
        in error
    )
    assert "expected at most 2.0 of the 2.2 GB of a GPU of 2.2 GB (GB: trainer: " in error, (
        "by turns, the engine is asleep"
    )
    assert "these would fit: " in error
    assert "actor.ppo_max_token_len 1536 (" in error


def test_a_dry_run_is_of_the_device_that_it_plans_for(cli: Cli, tiny: Path) -> None:
    """Not of this machine: bfloat16, and gradient checkpointing where the run fits with it alone."""
    out = dry_run(cli, tiny, "--dry-run-device", "24")
    assert f"{tiny} in bfloat16 on a GPU of 24 GB" in " ".join(out.split())
    assert f"{2 * count_parameters(tiny):,}" in out
    tight = ["--dry-run-device", "2.2", "--actor.ppo-max-token-len", "400000"]
    lines = dry_run(cli, tiny, *tight).splitlines()
    assert lines[-2:] == [CHECKPOINTED.format("100%"), "fits"]
    assert "gradient checkpointing" not in out
    finished = cli(
        "train",
        "--model",
        str(tiny),
        "--dry-run",
        *tight,
        "--actor.enable-gradient-checkpointing",
        "false",
    )
    assert finished.code == 2
    assert "actor.enable_gradient_checkpointing true" in finished.err
    # Weights for an engine in a process of its own are copied once more.
    counts = ("--rollout.num-processes", "0"), ("--rollout.num-processes", "1")
    peaks = [dry_run(cli, tiny, "--dry-run-device", "24", *count) for count in counts]
    assert peaks[0] != peaks[1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "model is not set; expected a local Hugging Face folder with dry_run"),
        (
            ["--model", "MODEL", "--dry-run-device", "H1"],
            "dry_run_device is 'H1'; expected one of B200, H200, H100",
        ),
        (
            ["--model", "MODEL", *SERVERS],
            "dry_run is true with rollout.engine 'vllm_server'; expected an engine that the run starts",
        ),
        (
            ["--model", "nowhere"],
            "model is 'nowhere'; expected a Hugging Face folder with config.json",
        ),
    ],
)
def test_dry_runs_that_are_refused(cli: Cli, tiny: Path, options: list[str], expected: str) -> None:
    given = [str(tiny) if option == "MODEL" else option for option in options]
    assert expected in cli.refused("train", "--dry-run", *given)
