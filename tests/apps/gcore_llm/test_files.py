"""Files that cannot be read or written: one line, exit code 2, and nothing that was finished is lost."""

import json
import resource
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from command_line import Cli, option_set, step_rows, write_rows
from safetensors.torch import load_file, save_file

from gcore_llm.cli import embedded
from gcore_runs import RunFolder, Supervisor, UserError


def truncated(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def no_header(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\x00" * 4)


def lost_shard(model: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def broken_index(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (truncated, "model/model.safetensors is damaged, or was not copied to its end: "),
        (no_header, "model/model.safetensors is damaged, or was not copied to its end: "),
        (
            lost_shard,
            "lacks model-00001-of-00002.safetensors, which model.safetensors.index.json names",
        ),
        (broken_index, "model/model.safetensors.index.json is no index of weights"),
    ],
)
@pytest.mark.parametrize("command", ["train", "sft"])
def test_damaged_weights(
    cli: Cli,
    own_args: list[str],
    tiny: Path,
    command: str,
    damage: Callable[[Path], None],
    expected: str,
) -> None:
    shutil.copytree(tiny, cli.cwd / "model")
    damage(cli.cwd / "model")
    args = option_set(own_args, "--model", "model")
    if command == "sft":
        args = [
            "sft",
            "--model",
            "model",
            "--data.train-files",
            args[args.index("--data.train-files") + 1],
        ]
    assert expected in cli.refused(*args)
    assert not (cli.cwd / "runs").exists()


@pytest.mark.parametrize("command", ["train", "sft", "reward-model"])
def test_a_tensor_that_the_weights_lack(
    cli: Cli, own_args: list[str], tiny: Path, command: str
) -> None:
    """transformers would draw it at random, and say so only in its log."""
    shutil.copytree(tiny, cli.cwd / "model")
    weights = load_file(tiny / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, cli.cwd / "model/model.safetensors", {"format": "pt"})
    args = option_set(own_args, "--model", "model")
    if command != "train":
        rows = write_rows(
            cli.cwd / "rows.jsonl",
            [{"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}],
        )
        if command == "sft":
            write_rows(rows, [{"prompt": "a", "completion": "b"}])
        args = [command, "--model", "model", "--data.train-files", rows]
    error = cli.refused(*args)
    assert (
        "the weights in model lack 1 of the model's tensors, such as model.layers.1.mlp.up_proj.weight"
        in error
    )


def test_data_files(cli: Cli, own_args: list[str]) -> None:
    def refused(name: str) -> str:
        return cli.refused(*option_set(own_args, "--data.train-files", name))

    (cli.cwd / "folder.jsonl").mkdir()
    assert (
        "data file folder.jsonl is a folder; expected a .jsonl, .parquet, .arrow or .csv file"
        in refused("folder.jsonl")
    )
    assert "data file /proc/self/mem.jsonl does not exist" in refused("/proc/self/mem.jsonl")
    (cli.cwd / "memory.jsonl").symlink_to("/proc/self/mem")
    assert "data file memory.jsonl cannot be read: " in refused("memory.jsonl")
    (cli.cwd / "memory.parquet").symlink_to("/proc/self/mem")
    assert "data file memory.parquet " in refused("memory.parquet")
    (cli.cwd / "binary.jsonl").write_bytes(bytes(range(256)))
    assert "data file binary.jsonl is not UTF-8" in refused("binary.jsonl")
    (cli.cwd / "zeros.jsonl").write_bytes(b"\x00" * 100)
    assert "zeros.jsonl:1 is not JSON" in refused("zeros.jsonl")
    (cli.cwd / "deep.jsonl").write_text("[" * 100_000)
    assert "deep.jsonl:1 is not JSON" in refused("deep.jsonl")
    (cli.cwd / "empty.jsonl").write_text("")
    assert "data file empty.jsonl has no rows" in refused("empty.jsonl")
    (cli.cwd / "empty.parquet").write_text("")
    assert "data file empty.parquet is not Parquet" in refused("empty.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [1, 2]}), cli.cwd / "numbers.parquet")
    assert "numbers.parquet: prompt of row 1 is 1; expected text, or a list of messages" in refused(
        "numbers.parquet"
    )
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), cli.cwd / "no.parquet"
    )
    assert "data file no.parquet has no rows" in refused("no.parquet")
    assert not (cli.cwd / "runs").exists()


def test_runs_folder_that_cannot_be_made(cli: Cli, own_args: list[str]) -> None:
    (cli.cwd / "file").write_text("")
    rows = own_args[own_args.index("--data.train-files") + 1]
    sft = ["sft", "--model", own_args[own_args.index("--model") + 1], "--data.train-files", rows]
    for folder in ("file", "file/below", "/proc/nowhere"):
        for args in (own_args, [*own_args, "--resume", "never"]):
            assert f"run folder {folder}/default cannot be made: " in cli.refused(
                *args, "--runs-dir", folder
            )
    write_rows(cli.cwd / "rows.jsonl", [{"text": "abc"}])
    sft = option_set(sft, "--data.train-files", "rows.jsonl")
    assert "run folder file/sft cannot be made: " in cli.refused(*sft, "--runs-dir", "file")


@pytest.mark.parametrize("command", ["sample", "eval", "report"])
def test_damaged_run(cli: Cli, own_args: list[str], command: str) -> None:
    run = cli.cwd / "runs/default"
    run.mkdir(parents=True)
    prompt = ["1+1="] if command == "sample" else []
    for text in ("[", "rollout = 3", 'model = "nowhere"', "quux = 3"):
        (run / "config.toml").write_text(text)
        if command != "report":
            cli.refused(command, run, *prompt)
    (run / "config.toml").write_text(f'model = "{own_args[own_args.index("--model") + 1]}"')
    (run / "metrics.jsonl").write_text("[\n{}\n3\n")
    (run / "checkpoints").write_text("")
    finished = cli(command, run, *prompt)
    assert "Traceback" not in finished.err
    assert finished.code in (0, 2)


@contextmanager
def files_of_at_most(size_bytes: int) -> Generator[None]:
    """As on a full disk, larger files fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: save_file({"weight": torch.zeros(2000)}, path),
        lambda path: path.write_bytes(bytes(8000)),
    ],
)
def test_a_disk_that_is_full_at_the_export(tmp_path: Path, write: Callable[[Path], object]) -> None:
    """Weights are written by safetensors, other files by Python: both are one error, and leave nothing half written."""
    supervisor = Supervisor(embedded(), app="gcore-llm")
    supervisor.run = RunFolder(tmp_path)
    expected = (
        r"the export .*export cannot be written: .*File too large.*; "
        "with enough space the same command writes it"
    )
    with pytest.raises(UserError, match=expected), files_of_at_most(4000):
        supervisor.export(lambda path: (path.mkdir(), write(path / "model.safetensors")))
    assert list(tmp_path.iterdir()) == []


# Python ignores the signal of the limit, so that writes fail as on a full disk.
FULL = """
import os
import resource


def reward(prompt, completion, row):
    global calls
    calls += 1
    if calls == {calls}:
        size = {size}
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return sum(ord(c) % 2 == 0 for c in completion) / max(len(completion), 1)


calls = 0
"""


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (
            "os.path.getsize('runs/default/metrics.jsonl') + 100",
            "runs/default/metrics.jsonl: File too large",
        ),
        ("100_000", "File too large"),
    ],
    ids=["metrics", "checkpoint"],
)
def test_a_disk_that_fills_up_in_training(
    cli: Cli, own_args: list[str], size: str, expected: str
) -> None:
    """The last committed checkpoint stays, and the same command resumes from it."""
    (cli.cwd / "mine.py").write_text(FULL.format(calls=130, size=size))
    args = option_set(own_args, "--reward", "mine.py:reward")
    args = [*option_set(args, "--trainer.total-training-steps", "6"), "--trainer.save-freq", "2"]
    error = cli.refused(*args)
    run = cli.cwd / "runs/default"
    assert "runs/default/" in error, error
    assert expected in error, error
    (cli.cwd / "mine.py").write_text(FULL.format(calls=-1, size=0))
    said = cli.ok(*args)
    assert "resuming after step 2 of 6" in said, said
    assert [row["step"] for row in step_rows(run)] == [1, 2, 3, 4, 5, 6]


def test_a_report_that_cannot_be_written(cli: Cli, own_args: list[str]) -> None:
    run = cli.cwd / "runs/default"
    (run / "report.html").mkdir(parents=True)
    (run / "report.html" / "file").write_text("")
    error = cli.refused(*own_args)
    assert (
        "the run is complete, with its export at runs/default/export, but its report cannot be written: "
        in error
    )
    assert (run / "export/model.safetensors").is_file()
    shutil.rmtree(run / "report.html")
    assert "report.html" in cli.ok("report", run)
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    (run / "report.html" / "file").write_text("")
    assert "report.html" in cli.refused("report", run)
