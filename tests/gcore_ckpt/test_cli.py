"""The `gcore-ckpt` command: what it prints, and its exit codes."""

import itertools
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gcore_ckpt import Checkpointer, CheckpointNotFoundError, PerRank, Shard
from gcore_ckpt.format.boxes import DTYPES
from gcore_ckpt.tools.cli import main

Captured = pytest.CaptureFixture[str]


def save(path: Path, *steps: int, **state: Any) -> Path:
    with Checkpointer(path) as checkpointer:
        for step in steps:
            checkpointer.save(
                step,
                {"model": {"w": torch.arange(6.0).view(2, 3), "b": torch.zeros(3)}, "lr": 0.1}
                | state,
            )
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path / "ckpt", 1, 2)


def flip_last_byte(path: Path, step: int) -> None:
    file = path / f"step-{step:08d}" / "data-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def run(capsys: Captured, *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def assert_fine(capsys: Captured, *arguments: object) -> str:
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    return out


def assert_error(capsys: Captured, message: str, *arguments: object) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("gcore-ckpt: error: ")
    assert err.count("\n") == 1
    assert message in err


def table(out: str) -> list[list[str]]:
    """The cells of the rows that a table has below its line."""
    lines = out.splitlines()
    first = next(number for number, line in enumerate(lines) if "─" in line) + 1
    return [line.split() for line in itertools.takewhile(str.strip, lines[first:])]


def test_ls(path: Path, capsys: Captured) -> None:
    rows = table(assert_fine(capsys, "ls", path))
    index = Checkpointer(path)
    assert [int(row[0]) for row in rows] == index.steps()
    size = sum(file.stat().st_size for file in (path / "step-00000001").glob("*.safetensors"))
    assert rows[0][1:4] == [str(size), "bytes", "2"]
    assert rows[0][4].startswith("20")
    assert rows[0][5] == "1"


def test_ls_says_what_is_damaged(path: Path, capsys: Captured) -> None:
    (path / "step-00000001" / "index.json").write_text("{}")
    out = assert_fine(capsys, "ls", path)
    assert "damaged: " in out.splitlines()[2]
    assert [row[0] for row in table(out)] == ["1", "2"]


def test_show(path: Path, capsys: Captured) -> None:
    weight = torch.ones(4, 5, dtype=torch.bfloat16)
    save(
        path,
        3,
        tied=weight,
        again=weight,
        seed=PerRank({"x": 5}),
        none=None,
        empty={},
        name="a\x1b[31mb",
    )
    out = assert_fine(capsys, "show", path)
    assert out.startswith(f"{path}/step-00000003: ")
    tensors = {cells[0]: cells[1:] for cells in table(out)}
    assert tensors["model.w"][:7] == ["float32", "[2,", "3]", "24", "bytes", "1", "rank"]
    assert tensors["tied"][:5] == ["bfloat16", "[4,", "5]", "40", "bytes"]
    assert " ".join(tensors["again"]).endswith("the same as tied")
    values = {cells[0]: cells[1:] for cells in table(out.partition("value")[2])}
    assert values["lr"] == ["0.1"]
    assert values["seed.rank"] == ["0.x", "5"]
    assert values["none"] == ["None"]
    assert values["empty"] == ["{}"]
    assert "\x1b" not in out


def test_show_a_part_of_a_step(path: Path, capsys: Captured) -> None:
    out = assert_fine(capsys, "show", path, "--step", 1, "--tensors", "model")
    assert [cells[0] for cells in table(out)] == ["model.w", "model.b"]
    assert "value" not in out
    assert_error(capsys, "holds nothing under 'mod'", "show", path, "--tensors", "mod")


def test_verify(path: Path, capsys: Captured) -> None:
    assert assert_fine(capsys, "verify", path) == "step 2: fine\n"
    assert assert_fine(capsys, "verify", path, "--all") == "step 1: fine\nstep 2: fine\n"
    flip_last_byte(path, 1)
    assert assert_fine(capsys, "verify", path, "--step", 2) == "step 2: fine\n"
    code, out, err = run(capsys, "verify", path, "--all")
    damaged, fine = out.splitlines()
    assert (code, fine, err) == (1, "step 2: fine", "")
    assert damaged.startswith(
        f"step 1: damaged: {path}/step-00000001/data-00000.safetensors: tensor "
    )
    assert_error(
        capsys, "holds no step 9; its committed steps are [1, 2]", "verify", path, "--step", 9
    )


def test_diff_of_the_same(path: Path, capsys: Captured) -> None:
    out = assert_fine(capsys, "diff", f"{path}@1", path)
    assert out == f"{path}/step-00000001 and {path}/step-00000002 hold the same\n"
    assert assert_fine(capsys, "diff", path, path, "--step-a", 1, "--step-b", 2) == out


def test_diff_of_others(path: Path, capsys: Captured, tmp_path: Path) -> None:
    other = {"w": torch.arange(6.0).view(3, 2), "b": torch.tensor([0, 0, -0.0])}
    save(path, 3, model=other, lr=0.2, nan=float("nan"), ints=[1, True])
    save(
        path,
        4,
        model=other | {"b": torch.zeros(3).half()},
        lr=torch.ones(1),
        nan=float("nan"),
        ints=[1, 1],
    )
    code, out, err = run(capsys, "diff", f"{path}@2", f"{path}@3")
    assert (code, err) == (1, "")
    assert [cells[:2] for cells in table(out)] == [
        ["shape", "model.w"], ["bytes", "model.b"], ["value", "lr"],
        ["missing", "nan"], ["missing", "ints.0"], ["missing", "ints.1"],
    ]  # fmt: skip
    assert "6 difference(s) between " in out
    code, out, _ = run(capsys, "diff", f"{path}@3", f"{path}@4")
    assert code == 1
    assert [cells[:2] for cells in table(out)] == [
        ["dtype", "model.b"],
        ["kind", "lr"],
        ["value", "ints.1"],
    ]


@pytest.mark.parametrize("changed", [False, True])
def test_diff_of_other_shardings_compares_bytes(
    tmp_path: Path, capsys: Captured, changed: bool
) -> None:
    weight = torch.arange(24.0).view(6, 4)
    rows = [
        Shard(global_shape=(6, 4), offset=(i, 0), tensor=weight[i : i + 3], name="w")
        for i in (0, 3)
    ]
    save(tmp_path / "a", 1, model={"w": weight.clone()})
    weight[5, 3] += changed
    save(tmp_path / "b", 1, model={"x": rows[0]}, tail={"y": rows[1]})
    code, out, _ = run(capsys, "diff", tmp_path / "a", tmp_path / "b")
    kinds = [cells[:2] for cells in table(out)]
    assert code == 1
    assert kinds == [["bytes", "model.w"]] * changed + [["missing", "tail.w"]]


def test_export_and_all_that_reads_a_hugging_face_folder(
    path: Path, capsys: Captured, tmp_path: Path
) -> None:
    hf = tmp_path / "hf"
    arguments = ["export-hf", path, hf, "--prefix", "model", "--dtype", "bfloat16", "--step", 1]
    assert assert_fine(capsys, *arguments) == f"wrote {hf}\n"
    found = load_file(hf / "model.safetensors")
    assert torch.equal(found["w"], torch.arange(6).view(2, 3).bfloat16())
    assert_error(capsys, "hf is there already", *arguments)
    assert table(assert_fine(capsys, "ls", hf))[0][0] == "-"
    assert [cells[:2] for cells in table(assert_fine(capsys, "show", hf))] == [
        ["w", "bfloat16"],
        ["b", "bfloat16"],
    ]
    assert "no checksums" in assert_fine(capsys, "verify", hf)
    assert "hold the same" in assert_fine(capsys, "diff", hf, hf)
    assert_error(
        capsys,
        "dtype is 'bf16'; expected None or one of ",
        "export-hf",
        path,
        tmp_path / "x",
        "--dtype",
        "bf16",
    )


def test_import_dcp(capsys: Captured, tmp_path: Path) -> None:
    assert_error(
        capsys, "holds no .metadata", "import-dcp", tmp_path, tmp_path / "ckpt", "--step", 4
    )
    from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp

    with pytest.warns(UserWarning, match="single process"):
        save_with_dcp({"x": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    out = assert_fine(capsys, "import-dcp", tmp_path / "dcp", tmp_path / "ckpt", "--step", 4)
    assert out == f"saved step 4 to {tmp_path / 'ckpt'}\n"
    assert Checkpointer(tmp_path / "ckpt").steps() == [4]


def test_prune(capsys: Captured, tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt", 1, 2, 3, 4, 5)
    arguments = ["prune", path, "--keep", 1, "--keep-every", 2]
    assert assert_fine(capsys, *arguments, "--dry-run") == "would delete step(s) 1, 3\n"
    with Checkpointer(path) as checkpointer:
        checkpointer.save(6, {}).wait()
        assert_error(capsys, "is being written to by process", *arguments)
    assert assert_fine(capsys, *arguments) == "deleted step(s) 1, 3, 5\n"
    assert assert_fine(capsys, *arguments) == "deleted nothing\n"
    assert Checkpointer(path).steps() == [2, 4, 6]
    assert_error(
        capsys, "keep is 0; expected None (keep all steps) or 1 or more", "prune", path, "--keep", 0
    )
    assert_error(capsys, "holds no committed step", "prune", tmp_path / "none", "--keep", 1)
    assert not (tmp_path / "none").exists()


def test_prune_keeps_the_best(capsys: Captured, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    with Checkpointer(path) as checkpointer:
        for step, metric in enumerate((0.5, 0.1, None, 0.7, 0.3)):
            checkpointer.save(step, {}, metric=metric)
    arguments = ["prune", path, "--keep", 1, "--keep-best", 1]
    assert assert_fine(capsys, *arguments, "--dry-run") == "would delete step(s) 0, 1, 2\n"
    assert assert_fine(capsys, *arguments, "--best-mode", "min") == "deleted step(s) 0, 2, 3\n"
    assert_error(capsys, "--keep-best is 1 without --keep; expected both", "prune", path, "--above", 3,
                 "--keep-best", 1)  # fmt: skip


def test_prune_above_and_rm(capsys: Captured, tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt", 1, 2, 3, 4, 5)
    assert (
        assert_fine(capsys, "prune", path, "--above", 3, "--dry-run")
        == "would delete step(s) 4, 5\n"
    )
    assert assert_fine(capsys, "prune", path, "--above", 3) == "deleted step(s) 4, 5\n"
    assert assert_fine(capsys, "prune", path, "--above", 3) == "deleted nothing\n"
    assert_error(capsys, "holds no step 7; its committed steps are [1, 2, 3]", "rm", path, 1, 7)
    assert Checkpointer(path).steps() == [1, 2, 3]
    with Checkpointer(path) as checkpointer:
        checkpointer.save(6, {}).wait()
        assert_error(capsys, "is being written to by process", "rm", path, 1)
        assert_error(capsys, "is being written to by process", "rollback", path, 1)
    assert assert_fine(capsys, "rm", path, 3, 1, 3) == "deleted step(s) 1, 3\n"
    assert Checkpointer(path).steps() == [2, 6]
    assert_error(capsys, "--keep-every is 2 without --keep; expected both", "prune", path, "--above", 3,
                 "--keep-every", 2)  # fmt: skip


def test_rollback(capsys: Captured, tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt", 1, 2, 3)
    assert_error(capsys, "holds no step 9", "rollback", path, 9)
    assert (
        assert_fine(capsys, "rollback", path, 1) == "set aside step(s) 2, 3; the latest step is 1\n"
    )
    assert assert_fine(capsys, "rollback", path, 1) == "set aside nothing; the latest step is 1\n"
    out = assert_fine(capsys, "ls", path)
    assert [row[0] for row in table(out)] == ["1"]
    assert out.endswith("\nset aside by rollback: step(s) 2, 3\n")
    assert (
        assert_fine(capsys, "prune", path, "--set-aside", "--dry-run")
        == "would delete step(s) 2, 3\n"
    )
    assert assert_fine(capsys, "prune", path, "--set-aside") == "deleted step(s) 2, 3\n"
    assert assert_fine(capsys, "prune", path, "--set-aside") == "deleted nothing\n"
    assert "set aside" not in assert_fine(capsys, "ls", path)
    assert not list(path.glob("set-aside-*"))


def test_an_object_store(capsys: Captured) -> None:
    url = "memory://cli/ckpt"
    with Checkpointer(url) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.ones(2)})
    assert [row[0] for row in table(assert_fine(capsys, "ls", url))] == ["1", "2"]
    assert table(assert_fine(capsys, "show", f"{url}"))[0][0] == "w"
    assert assert_fine(capsys, "verify", url, "--all") == "step 1: fine\nstep 2: fine\n"
    assert "hold the same" in assert_fine(capsys, "diff", f"{url}@1", url)
    assert assert_fine(capsys, "rollback", url, 1) == "set aside step(s) 2; the latest step is 1\n"
    assert assert_fine(capsys, "ls", url).endswith("\nset aside by rollback: step(s) 2\n")
    save_again = Checkpointer(url)
    save_again.save(2, {})
    save_again.close()
    assert assert_fine(capsys, "prune", url, "--keep", 1) == "deleted step(s) 1\n"
    assert assert_fine(capsys, "prune", url, "--set-aside") == "deleted step(s) 2\n"
    assert assert_fine(capsys, "rm", url, 2) == "deleted step(s) 2\n"


@pytest.mark.parametrize(
    "command",
    ["ls", "show", "verify", "diff", "export-hf", "import-dcp", "prune", "rm", "rollback"],
)
def test_help_of_each_command_has_an_example(capsys: Captured, command: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"example: gcore-ckpt {command} " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["ls"],
        ["show", "x", "--step", "-1"],
        ["show", "x", "--step", "1.5"],
        ["prune", "x"],
        ["rm", "x"],
        ["prune", "x", "--keep", "1", "--above", "1"],
        ["rollback", "x"],
        ["rm", "x", "latest"],
    ],
)
def test_wrong_use(capsys: Captured, arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "error: " in capsys.readouterr().err


def test_errors_take_one_line(path: Path, capsys: Captured) -> None:
    assert_error(capsys, "holds no committed step", "ls", f"{path}-not\n\x1b[31m")
    assert_error(capsys, "ftp", "ls", "ftp://host/folder")
    assert_error(capsys, "names step 1 and --step-a is 2", "diff", f"{path}@1", path, "--step-a", 2)


def test_ctrl_c(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gcore_ckpt.tools.cli.open_step", interrupt)
    assert main(["ls", str(path)]) == 130


def test_a_process_of_its_own_prints_dtypes_without_torch(tmp_path: Path) -> None:
    names = sorted(DTYPES)
    path = save(
        tmp_path / "ckpt",
        1,
        all={n: torch.zeros(16, dtype=torch.uint8).view(getattr(torch, n)) for n in names},
    )
    program = "import sys; from gcore_ckpt.tools.cli import main; code = main(sys.argv[1:]); "
    program += "assert not {'torch', 'numpy', 'tensorstore'} & set(sys.modules); sys.exit(code)"
    for command in ("ls", "show"):
        shown = subprocess.run(
            [sys.executable, "-c", program, command, path],
            capture_output=True,
            text=True,
            check=True,
            timeout=600,
        )
        assert shown.stderr == ""
    assert [row[0] for row in table(shown.stdout)] == [
        "model.w",
        "model.b",
        *(f"all.{name}" for name in names),
    ]
    failed = subprocess.run(
        [sys.executable, "-m", "gcore_ckpt", "ls", tmp_path], capture_output=True, text=True, timeout=600,
        env=os.environ | {"COLUMNS": "40"}, check=False,
    )  # fmt: skip
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == f"gcore-ckpt: error: {tmp_path} holds no committed step\n"


def test_ls_as_json(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "ckpt"
    with Checkpointer(path) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"x": torch.zeros(3)}, metric=0.5 * step)
        checkpointer.rollback(2)
    flip_last_byte(path, 1)
    (path / "step-00000001" / "index.json").write_text("{}")
    listed = json.loads(assert_fine(capsys, "ls", path, "--json"))
    damaged, whole = listed["steps"]
    assert damaged["step"] == 1
    assert "index.json" in damaged["damaged"]
    size = sum(file.stat().st_size for file in (path / "step-00000002").glob("*.safetensors"))
    saved_at = whole.pop("saved_at")
    assert saved_at.startswith("20")
    assert whole == {"step": 2, "size_bytes": size, "tensors": 1, "ranks": 1, "metric": 1.0}
    assert listed["set_aside"] == [3]
    assert table(assert_fine(capsys, "ls", path))[1][-1] == "1.0"


def test_import_pt(tmp_path: Path, capsys: Captured) -> None:
    model = torch.nn.Linear(2, 3)
    source, path = tmp_path / "model.pt", tmp_path / "ckpt"
    torch.save({"model": model.state_dict(), "epoch": 3}, source)
    assert (
        assert_fine(capsys, "import-pt", source, path, "--step", 7) == f"saved step 7 to {path}\n"
    )
    saved = Checkpointer(path).load(step=7)
    assert saved["epoch"] == 3
    assert torch.equal(saved["model"]["weight"], model.weight)
    assert_error(capsys, "already holds step 7", "import-pt", source, path, "--step", 7)
    ran = tmp_path / "ran"
    source.write_bytes(pickle.dumps(Bomb(ran)))
    assert_error(capsys, "torch.load(weights_only=True) refuses it", "import-pt", source, path)
    assert not ran.exists()
    assert_error(
        capsys,
        "is no file; expected one that torch.save wrote",
        "import-pt",
        tmp_path / "none.pt",
        path,
    )


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_path_that_is_something_else_is_explained(
    path: Path, tmp_path: Path, capsys: Captured
) -> None:
    step_folder = path / "step-00000002"
    dcp = tmp_path / "step-100"
    dcp.mkdir()
    (dcp / ".metadata").touch()
    models = tmp_path / "models"
    models.mkdir()
    file = models / "model.pt"
    file.touch()
    hints = {
        step_folder: f"is named like the folder of one step; expected the path '{path}' with step 2",
        path / "step-2": f"expected the path '{path}' with step 2",
        dcp: f"gcore-ckpt import-dcp {dcp} NEW_PATH",
        file: f"it is a file; if torch.save wrote it, import it: gcore-ckpt import-pt {file} NEW_PATH",
        models: f"it holds files of torch.save; import one: gcore-ckpt import-pt {file} NEW_PATH",
        tmp_path / "none": "there is no such folder",
    }
    for place, hint in hints.items():
        assert_error(capsys, f"{place} holds no committed step: ", "show", place)
        with pytest.raises(CheckpointNotFoundError, match=re.escape(hint)):
            Checkpointer(place).load()
