"""What can be seen of a run from outside: spans of controllers and devices, Prometheus, the display and the logs."""

import asyncio
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from datetime import datetime
from functools import partial
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.text import Text

# As gcore_rollout's tests use it.
sys.path.append(str(Path(__file__).parents[2] / "gcore_rollout"))
from fake_engine import FakeEngine  # pyright: ignore[reportMissingImports]

from gcore_controller import Context, DeviceTimers, DeviceWork, Span, run_inline
from gcore_controller.context import on_wall_clock
from gcore_controller.runtimes.inline import SharedTrainerClient
from gcore_llm.cli import main, own_data
from gcore_llm.modality import RunRecorder
from gcore_llm.report import KINDS
from gcore_llm.sampling import start_policy
from gcore_rollout import EngineReplicas, FailureLog, Request, SamplingParams
from gcore_rollout.rewards.reward import warn_of_slow_call
from gcore_runs.engines import Instrumentation
from gcore_runs.errors import UserError
from gcore_runs.logs import announce_slow_calls, log_to, merged_lines, one_line, printable
from gcore_runs.loop.recorder import Display, shown_cells
from gcore_runs.report.page import render_report
from gcore_runs.run_folder import MetricsWriter, RunFolder, SpanWriter, StepSpans, read_jsonl
from gcore_runs.trackers.prometheus import PrometheusExporter


def span(stage: str, start_s: float, end_s: float) -> Span:
    return Span(stage=stage, start_s=start_s, end_s=end_s)


def scrape(exporter: PrometheusExporter) -> dict[str, Metric]:
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=300) as reply:
        return {
            family.name: family for family in text_string_to_metric_families(reply.read().decode())
        }


def value(family: Metric, suffix: str = "") -> float:
    [sample] = [s for s in family.samples if s.name == family.name + suffix]
    return sample.value


def test_spans_are_written_relative_to_their_step_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    writer = SpanWriter(path)
    first = [
        [span("gen", 1000.0, 1002.0), span("train", 1003.0, 1004.0)],
        [span("gen", 1000.5, 1001.0)],
    ]
    writer.write(1, first, devices={"trainer 0": [span("train", 1003.25, 1004.5)]})
    writer.write(2, [[span("gen", 1005.0, 1006.00004)], []])
    rows = read_jsonl(path)
    assert rows == [
        {
            "step": 1,
            "start_s": 0.0,
            "controllers": [[["gen", 0.0, 2.0], ["train", 3.0, 4.0]], [["gen", 0.5, 1.0]]],
            "devices": {"trainer 0": [["train", 3.25, 4.5]]},
        },
        {"step": 2, "start_s": 5.0, "controllers": [[["gen", 0.0, 1.0]], []]},
    ]
    steps = [StepSpans.from_row(row) for row in rows]
    assert [step.end_s for step in steps] == [4.5, 6.0]
    assert [step.to_row() for step in steps] == rows


def test_neighbouring_spans_of_one_stage_are_one(tmp_path: Path) -> None:
    parts = [
        span("gen", 2.0, 2.5),
        span("gen", 0.0, 1.0),
        span("gen", 1.0005, 2.0),
        span("gen", 2.6, 3.0),
    ]
    SpanWriter(tmp_path / "s").write(1, [[*parts, span("reward", 3.0, 3.1), span("gen", 3.1, 3.2)]])
    [row] = read_jsonl(tmp_path / "s")
    assert row["controllers"] == [
        [["gen", 0, 2.5], ["gen", 2.6, 3.0], ["reward", 3.0, 3.1], ["gen", 3.1, 3.2]]
    ]


def test_resumed_run_continues_after_its_last_kept_step(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    before = SpanWriter(path)
    for step in (1, 2, 3):
        before.write(step, [[span("gen", 50.0 + step, 50.75 + step)]])
    resumed = SpanWriter(path, last_step=2)
    assert [row["step"] for row in read_jsonl(path)] == [1, 2]
    resumed.write(3, [[span("gen", 9000.0, 9001.0)]])
    resumed.write(4, [[span("gen", 9002.0, 9003.0)]])
    assert [row["start_s"] for row in read_jsonl(path)] == [0.0, 1.0, 1.75, 3.75]
    SpanWriter(path)
    assert read_jsonl(path) == []


def test_waits_of_controllers_open_the_next_step(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    writer = SpanWriter(path)
    writer.record_wait(span("checkpoint", 50.0, 51.0))
    for step in (1, 2, 3):
        writer.write(step, [[span("gen", 50.0 + step, 50.75 + step)], []])
    writer.record_wait(span("checkpoint", 54.0, 54.5))
    # Step 3 is lost, and made again; what passed since the end of step 2 is due to that.
    writer.resume(last_step=2, cause="failure")
    writer.write(3, [[span("gen", 60.0, 60.5)], []])
    writer.record_wait(span("checkpoint", 60.5, 60.75))
    writer.write(4, [[span("gen", 61.0, 62.0)], []])
    rows = [(row["step"], row["start_s"], row["controllers"]) for row in read_jsonl(path)]
    assert rows == [
        (1, 0.0, [[["gen", 0.0, 0.75]], []]),
        (2, 1.0, [[["gen", 0.0, 0.75]], []]),
        (3, 1.75, [[["failure", 0.0, 7.25], ["gen", 7.25, 7.75]], [["failure", 0.0, 7.25]]]),
        (4, 9.5, [[["checkpoint", 0.0, 0.25], ["gen", 0.5, 1.5]], [["checkpoint", 0.0, 0.25]]]),
    ]


def test_step_without_a_span_is_a_row_of_its_own(tmp_path: Path) -> None:
    writer = SpanWriter(tmp_path / "s")
    for spans in ([], [span("gen", 7.0, 8.0)], []):
        writer.write(1, [spans])
    assert [(row["start_s"], row["controllers"]) for row in read_jsonl(tmp_path / "s")] == [
        (0.0, [[]]),
        (0.0, [[["gen", 0.0, 1.0]]]),
        (1.0, [[]]),
    ]


def test_spans_of_unrelated_clocks_become_comparable() -> None:
    before_s = time.time()
    [shifted] = on_wall_clock([span("gen", 90.0, 95.0)], now_s=100.0)
    after_s = time.time()
    assert before_s - 10 <= shifted.start_s <= after_s - 10
    assert shifted.end_s - shifted.start_s == pytest.approx(5.0, abs=1e-5)


class Clock:
    """Moves when it is asked to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def drained(devices: DeviceTimers, clock: Clock) -> dict[str, list[tuple[str, float, float]]]:
    """What a drain gives, by the timers' own clock, to a tenth of a second."""
    shift_s = time.time() - clock.now_s
    return {
        name: [(s.stage, round(s.start_s - shift_s, 1), round(s.end_s - shift_s, 1)) for s in spans]
        for name, spans in devices.drain().spans.items()
    }


def test_device_is_in_the_stage_of_the_call_that_began_last() -> None:
    clock = Clock()
    devices = DeviceTimers(clock)
    with devices.stage("gen", "engine 0"):
        clock.now_s = 1.0
        second = devices.stage("gen", "engine 0", "engine 1")
        second.__enter__()
        clock.now_s = 2.0
        with devices.stage("sync", "engine 0"):
            clock.now_s = 3.0
            second.__exit__(None, None, None)
            clock.now_s = 4.0
        clock.now_s = 6.0
    clock.now_s = 9.0
    with devices.stage("gen", "engine 0"):
        clock.now_s = 10.0
        assert drained(devices, clock) == {
            "engine 0": [("gen", 0, 2), ("sync", 2, 4), ("gen", 4, 6), ("gen", 9, 10)],
            "engine 1": [("gen", 1, 3)],
        }
        clock.now_s = 12.0
    # What was cut continues.
    assert drained(devices, clock) == {"engine 0": [("gen", 10, 12)], "engine 1": []}


def test_spans_of_a_device_from_several_controllers_are_one_row() -> None:
    first, second, other = span("gen", 1, 2), span("sync", 3, 4), span("train", 1, 4)
    parts = [{"engine 0": [second], "trainer 0": [other]}, {}, {"engine 0": [first]}]
    assert DeviceWork.merge(DeviceWork(spans=spans) for spans in parts).spans == {
        "engine 0": [second, first],
        "trainer 0": [other],
    }


def request(name: str, *, max_tokens: int, n: int = 1) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=(3, 4),
        sampling=SamplingParams(max_tokens=max_tokens),
        n=n,
    )


def stages(spans: Sequence[Span]) -> list[str]:
    return [s.stage for s in spans]


async def test_replicas_are_busy_while_they_have_samples_to_make() -> None:
    devices = DeviceTimers()
    instrumentation = Instrumentation(devices=devices)
    inner = [FakeEngine(step_s=0.02) for _ in range(2)]
    engine = EngineReplicas(
        [instrumentation.instrument(each, place) for place, each in enumerate(inner)]
    )
    made = [
        c
        async for c in engine.generate(
            [request("long", max_tokens=20), request("short", max_tokens=2)]
        )
    ]
    assert [len(c.token_ids) for c in made] == [2, 20]
    spans = devices.drain().spans
    assert {name: stages(own) for name, own in spans.items()} == {
        "engine 0": ["gen"],
        "engine 1": ["gen"],
    }
    (long,), (short,) = spans["engine 0"], spans["engine 1"]
    assert long.end_s - long.start_s > 0.39
    assert short.end_s < long.end_s

    await engine.update_weights([], version=1)
    async with aclosing(engine.generate([request("left", max_tokens=1, n=2)])) as completions:
        await anext(completions)
    assert {name: stages(own)[0] for name, own in devices.drain().spans.items()} == {
        "engine 0": "sync",
        "engine 1": "sync",
    }
    # Whatever was left off is over.
    assert devices.drain().spans == {"engine 0": [], "engine 1": []}
    await engine.pause()
    await engine.resume()
    await engine.close()
    assert all(each.calls == ["pause", "resume"] and each.closed for each in inner)


class SleepingLearner:
    """Every call takes a while."""

    num_replicas = 2
    num_updates = 0

    async def score(
        self, role: str, micro_batches: Sequence[Any], *, with_routing: bool = False
    ) -> list[Any]:
        del role, with_routing
        await asyncio.sleep(0.02)
        return list(micro_batches)

    async def train_step(self, role: str, micro_batches: Sequence[Any]) -> dict[str, float]:
        await self.score(role, micro_batches)
        return {"size": float(len(micro_batches))}

    def export_weights(self, *, averaged: bool = False) -> Iterator[Any]:
        assert not averaged
        time.sleep(0.02)
        return iter(())


async def test_training_ranks_are_busy_in_calls_of_the_learner() -> None:
    devices = DeviceTimers()
    learner: Any = SleepingLearner()
    policy = Instrumentation(devices=devices).instrument(FakeEngine(), 0)

    async def program(ctx: Context[None]) -> None:
        part: SharedTrainerClient[Any] = SharedTrainerClient(
            learner, ctx.group, devices, num_ranks=2
        )
        batches: Any = [f"of {ctx.rank}"]
        assert await part.score("reference", batches) == batches
        assert await part.score("actor", batches, with_routing=True) == batches
        assert await part.train_step("actor", batches) == {"size": 2.0}
        await part.update_weights(policy, version=1)

    await run_inline(program, roles=None, world_size=2)
    spans = devices.drain().spans
    assert spans.keys() == {"trainer 0", "trainer 1", "engine 0"}
    assert stages(spans["engine 0"]) == ["sync"]
    for rank in range(2):
        own = spans[f"trainer {rank}"]
        assert list(dict.fromkeys(stages(own))) == ["prepare", "train", "sync"]
        assert all(s.end_s - s.start_s > 0.015 for s in own)


def started(logs: Path) -> list[int]:
    """The processes that have started to log."""
    lines = [line for path in sorted(logs.iterdir()) for line in path.read_text().splitlines()]
    return [
        int(process)
        for line in lines
        for process in re.findall(r"process (\d+) on \S+ begins$", line)
    ]


@pytest.mark.slow
async def test_engine_processes_log_and_are_seen_whichever_has_a_place(
    tmp_path: Path, tiny: Path
) -> None:
    config = own_data()
    config = replace(
        config,
        threads=1,
        device="cpu",
        dtype="float32",
        rollout=replace(config.rollout, num_processes=2),
    )
    devices, logs = DeviceTimers(), tmp_path / "logs"
    engine = await start_policy(
        config, tiny, eos_token_ids=[1], instrumentation=Instrumentation(devices=devices, logs=logs)
    )
    try:
        assert len([c async for c in engine.generate([request("r", max_tokens=4, n=8)])]) == 8
        spans = devices.drain().spans
        assert {name: stages(own) for name, own in spans.items()} == {
            "engine 0": ["gen"],
            "engine 1": ["gen"],
        }
        first, _ = started(logs)
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(300):
            while len(started(logs)) < 3:
                assert (
                    len([c async for c in engine.generate([request("r", max_tokens=4, n=8)])]) == 8
                )
        assert not Path(f"/proc/{first}").exists()
        assert all(Path(f"/proc/{pid}").exists() for pid in started(logs) if pid != first)
    finally:
        await engine.close()
    assert {path.name for path in logs.glob("*.log")} == {"engine-0.log", "engine-1.log"}
    assert {name for name, own in devices.drain().spans.items() if own} == {"engine 0", "engine 1"}


def test_a_running_job_can_be_scraped(tmp_path: Path) -> None:
    """Two controllers whose rank 0 records as that of `train` does."""
    run = RunFolder(tmp_path / "observed")
    run.path.mkdir()
    run.config.write_text("[trainer]\ntotal_training_steps = 3\n")
    spans = SpanWriter(run.path / "spans.jsonl")
    scraped: list[dict[str, Metric]] = []

    async def program(ctx: Context[None]) -> None:
        for step in (1, 2, 3):
            start_s = ctx.clock()
            with ctx.timer.stage("gen"):
                await asyncio.sleep(0.01 * (ctx.rank + 1))
            await ctx.group.barrier()
            with ctx.timer.stage("train"):
                await asyncio.sleep(0.01)
            own = on_wall_clock(ctx.timer.drain(), ctx.clock())
            everyones = await ctx.group.all_gather(own)
            if ctx.rank == 0:
                metrics = {"critic/score/mean": step / 4, "timing_s/step": ctx.clock() - start_s}
                writer.write(step, metrics | ({"val/greedy/score/mean": 0.5} if step == 1 else {}))
                spans.write(step, everyones)
                scraped.append(await asyncio.to_thread(scrape, exporter))

    with (
        PrometheusExporter(run="observed", port=0, app="gcore-llm") as exporter,
        MetricsWriter(run, last_step=0, tensorboard=False, trackers=[exporter]) as writer,
    ):
        asyncio.run(run_inline(program, roles=None, world_size=2))
    rows = read_jsonl(run.metrics)
    assert len(scraped) == len(rows) == 3
    for row, families in zip(rows, scraped, strict=True):
        assert value(families["gcore_step"]) == row["step"]
        assert value(families["gcore_critic_score_mean"]) == row["critic/score/mean"]
        assert value(families["gcore_timing_s_step"]) == row["timing_s/step"]
        assert value(families["gcore_val_greedy_score_mean"]) == 0.5
        assert families["gcore_critic_score_mean"].documentation == "critic/score/mean"
        assert {families[name].type for name in ("gcore_step", "gcore_timing_s_step")} == {"gauge"}
        [info] = families["gcore_info"].samples
        assert (info.labels, info.value) == (
            {"run": "observed", "version": version("gcore-llm")},
            1.0,
        )
    seconds = scraped[-1]["gcore_step_seconds"]
    assert seconds.type == "histogram"
    assert value(seconds, "_count") == 3
    assert value(seconds, "_sum") == pytest.approx(sum(row["timing_s/step"] for row in rows))

    assert [len(row["controllers"]) for row in read_jsonl(run.path / "spans.jsonl")] == [2, 2, 2]
    page = render_report(run.path, KINDS).read_text()
    assert "Steps 1 to 3." in page
    assert '"controller 1"' in page


def test_metrics_that_differ_in_a_slash_alone_have_a_gauge_each() -> None:
    with PrometheusExporter(run="r", port=0) as exporter:
        exporter.write(
            1,
            {"reward/a/mean": 1.0, "reward/a_mean": 2.0, "step": 3.0, "reward/no-go": float("nan")},
        )
        exporter.write(2, {"reward/a_mean": 4.0})
        families = scrape(exporter)
    values = {
        family.documentation: value(family)
        for family in families.values()
        if family.type == "gauge"
    }
    assert values["reward/a/mean"] == 1.0
    assert values["reward/a_mean"] == 4.0
    assert values["step"] == 3.0
    assert value(families["gcore_step"]) == 2.0
    assert str(value(families["gcore_reward_no_go"])) == "nan"


def test_port_in_use_is_refused_by_name_and_freed_in_the_end() -> None:
    with PrometheusExporter(run="first", port=0) as first:
        refused = f"trainer.prometheus is '127.0.0.1:{first.port}'; expected a"
        with pytest.raises(UserError, match=re.escape(refused)):
            PrometheusExporter(run="second", port=first.port)
        # Nothing is served at other addresses of the machine.
        with PrometheusExporter(run="second", port=first.port, host="127.0.0.2"):
            pass
    with PrometheusExporter(run="second", port=first.port) as second:
        assert scrape(second)["gcore_info"].samples[0].labels["run"] == "second"
    with pytest.raises(urllib.error.URLError):
        scrape(second)


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 0), ("127.0.0.1", 70_000)])
def test_address_that_cannot_be_served_at_is_refused(host: str, port: int) -> None:
    with pytest.raises(UserError, match=f"trainer.prometheus is '{host}:{port}'"):
        PrometheusExporter(run="r", port=port, host=host)


def shown(stages: list[str | None], metrics: dict[str, float]) -> str:
    """What a terminal shows of a step."""
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    with Display(console) as display:
        display.phase("training", total=4)
        display.watch(lambda: stages)
        display.show_progress(2, shown_cells(RunRecorder.cells, metrics))
    assert isinstance(console.file, io.StringIO)
    return Text.from_ansi(console.file.getvalue()).plain


def test_display_shows_where_each_of_several_controllers_is() -> None:
    stages = ["gen", "gen", "reward", "gen", "gen", "gen", None, "own"]
    assert "controllers   gen 0-1, 3-5   reward 2   no stage 6   own 7" in shown(stages, {})
    assert "controllers" not in shown(["gen"], {})


def test_display_shows_the_busiest_controller_where_loads_are_known() -> None:
    text = shown(["gen"], {"controller/load/max": 0.0312})
    assert re.search(r"busiest controller\s*\n.* 3\.1%", text), text
    assert "busiest" not in shown(["gen"], {})


def test_display_counts_what_takes_long_before_training() -> None:
    terminal, plain = (
        Console(file=io.StringIO(), force_terminal=is_one, width=100) for is_one in (True, False)
    )
    for console in (terminal, plain):
        with Display(console) as display:
            display.show_count("tokenizing a.jsonl", 1000, 4000)
            display.show_count("tokenizing a.jsonl", 3000, 4000)
    assert isinstance(terminal.file, io.StringIO)
    assert re.search(
        r"tokenizing a.jsonl .* 3000/4000", Text.from_ansi(terminal.file.getvalue()).plain
    )
    assert isinstance(plain.file, io.StringIO)
    assert plain.file.getvalue() == "tokenizing a.jsonl: 1,000 of 4,000\n", (
        "the next line is ten seconds later"
    )


WORKER = """
import ctypes, logging, os, signal, sys, warnings
from pathlib import Path
from gcore_runs.logs import log_to

log_to(Path(sys.argv[1]), "engine", int(sys.argv[2]), redirect=True)
logging.getLogger("a.b").info("first\\nsecond")
warnings.warn("careful")
try:
    1 / 0
except ZeroDivisionError:
    logging.exception("caught")
print("from print")
os.write(2, b"from a descriptor\\n")
ctypes.CDLL(None).puts(b"from a library")
{end}
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
RAISED = 'raise RuntimeError("boom")'
CRASHED = "ctypes.string_at(0)"


def stamp(seconds: float) -> str:
    return f"2026-11-21T22:00:{seconds:09.6f}Z"


def work(folder: Path, rank: int, end: str) -> int:
    command = [sys.executable, "-c", WORKER.format(end=end), str(folder), str(rank)]
    # Unbuffered output would reach the file without any effort.
    env = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    result = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert (result.stdout, result.stderr) == ("", "")
    return result.returncode


def texts(lines: Iterator[str]) -> list[str]:
    """The lines without their times."""
    return [line.partition(" ")[2] for line in lines]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with logs of two processes."""
    folder = tmp_path / "run" / "logs"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "config.toml").touch()
    (folder / "main.log").write_text(
        f"{stamp(1)} main INFO a: starts\n{stamp(4)} main ERROR a: lost\n"
    )
    (folder / "engine-1.log.1").write_text(f"{stamp(0)} engine-1 INFO b: begins\n")
    (folder / "engine-1.log").write_text(
        f"one\n{stamp(2)} engine-1 MARK output: until here\n"
        f"\r10%\r20%{stamp(3)} engine-1 INFO b: works\n"
        f"two\n{stamp(4.5)} engine-1 WARNING b: tired\nlast words"
    )
    os.utime(folder / "engine-1.log", (1.0, time_of(stamp(6))))
    return tmp_path / "run"


def time_of(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize(
    ("end", "code"), [(KILLED, -signal.SIGKILL), (RAISED, 1), (CRASHED, -signal.SIGSEGV)]
)
def test_all_that_a_dying_process_wrote_is_in_its_log(tmp_path: Path, end: str, code: int) -> None:
    assert work(tmp_path, 3, end) == code
    assert [path.name for path in tmp_path.glob("*.log*")] == ["engine-3.log"]
    lines = texts(merged_lines(tmp_path))
    assert re.fullmatch(r"engine-3 INFO gcore_runs.logs: process \d+ on \S+ begins", lines[0])
    assert lines[1:3] == ["engine-3 INFO a.b: first", "engine-3 INFO second"]
    assert lines[3] == "engine-3 WARNING py.warnings: <string>:8: UserWarning: careful"
    assert (
        lines[lines.index("engine-3 ERROR root: caught") + 1]
        == "engine-3 ERROR Traceback (most recent call last):"
    )
    output = [
        line.removeprefix("engine-3 OUT ") for line in lines if line.startswith("engine-3 OUT ")
    ]
    assert output[:3] == ["from print", "from a descriptor", "from a library"]
    last = {
        KILLED: "from a library",
        RAISED: "RuntimeError: boom",
        CRASHED: '  File "<string>", line 16 in <module>',
    }
    assert last[end] in output
    assert ("Fatal Python error: Segmentation fault" in output) == (end == CRASHED)


def test_a_replacement_process_continues_the_log_file(tmp_path: Path) -> None:
    work(tmp_path, 0, KILLED)
    file = tmp_path / "engine-0.log"
    os.utime(file, (time_of(stamp(7)), time_of(stamp(7))))
    work(tmp_path, 0, KILLED)
    lines = list(merged_lines(tmp_path))
    assert sum("begins" in line for line in lines) == 2
    # The first one's last words keep the time at which they were written.
    dated = [line for line in file.read_text().splitlines() if "MARK" in line]
    assert dated[0].startswith(stamp(7))
    assert f"{stamp(7)} engine-0 OUT from a library" in lines


def test_output_is_dated_while_the_process_is_silent(tmp_path: Path) -> None:
    code = "import time, sys; from pathlib import Path; from gcore_runs.logs import log_to\n"
    code += "log_to(Path(sys.argv[1]), 'main', redirect=True); print('quiet'); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE
    ) as process:
        file = tmp_path / "main.log"
        while not file.exists() or "MARK" not in file.read_text():
            assert process.poll() is None
            time.sleep(0.02)
        assert file.read_text().splitlines()[1] == "quiet"
        process.kill()


def log_all_and_fail() -> None:
    logging.getLogger("x").info("quiet")
    logging.getLogger("x").warning("loud")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", stacklevel=1)
    raise KeyError("gone")


def test_main_process_logs_and_shows_as_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root, level = logging.getLogger(), logging.getLogger().level
    kept, root.handlers[:] = root.handlers[:], []
    try:
        with pytest.raises(KeyError), log_to(tmp_path, "main"):
            log_all_and_fail()
        assert (root.handlers, root.level) == ([], level)
    finally:
        root.handlers[:] = kept
    lines = texts(merged_lines(tmp_path))
    assert lines[1:3] == ["main INFO x: quiet", "main WARNING x: loud"]
    assert "main ERROR KeyError: 'gone'" in lines
    err = capfd.readouterr().err
    assert err.startswith("loud\n")
    assert "careful" in err
    assert not {"quiet", "gone"} & set(re.findall(r"\w+", err))


def test_logging_again_goes_to_the_new_file_alone(tmp_path: Path) -> None:
    first = log_to(tmp_path, "main")
    with log_to(tmp_path, "trainer", 2):
        logging.warning("here")
        first.close()
        logging.warning("and here")
    assert texts(merged_lines(tmp_path, role="trainer"))[1:] == [
        "trainer-2 WARNING root: here",
        "trainer-2 WARNING root: and here",
    ]
    assert "here" not in (tmp_path / "main.log").read_text()


@pytest.mark.parametrize("role", ["", "Engine", "engine-1", "../x"])
def test_role_that_no_file_can_be_named_after_is_refused(tmp_path: Path, role: str) -> None:
    with pytest.raises(ValueError, match="expected lower-case letters"):
        log_to(tmp_path / "logs", role)
    assert list(tmp_path.iterdir()) == []


def test_full_files_rotate_and_keep_all_output(tmp_path: Path) -> None:
    code = "import logging, os, sys; from pathlib import Path; from gcore_runs import logs\n"
    code += (
        "logs.MAX_FILE_BYTES = 2000; logs.log_to(Path(sys.argv[1]), 'trainer', 0, redirect=True)\n"
    )
    code += "for i in range(30): logging.info('record %d', i); os.write(1, b'output %d\\n' % i)"
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, timeout=600)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert {"trainer-0.log", "trainer-0.log.1"} <= sizes.keys()
    assert max(sizes.values()) < 2100
    expected = [text for i in range(30) for text in (f"INFO root: record {i}", f"OUT output {i}")]
    assert [
        line.removeprefix("trainer-0 ") for line in texts(merged_lines(tmp_path))[1:]
    ] == expected


def test_logs_are_merged_by_time(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["logs", str(run_dir)])
    assert capsys.readouterr().out.splitlines() == [
        f"{stamp(0)} engine-1 INFO b: begins",
        f"{stamp(1)} main INFO a: starts",
        f"{stamp(2)} engine-1 OUT one",
        f"{stamp(3)} engine-1 OUT 20%",
        f"{stamp(3)} engine-1 INFO b: works",
        f"{stamp(4)} main ERROR a: lost",
        f"{stamp(4.5)} engine-1 OUT two",
        f"{stamp(4.5)} engine-1 WARNING b: tired",
        f"{stamp(6)} engine-1 OUT last words",
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--role", "main"], [stamp(1), stamp(4)]),
        (["--rank", "1", "--lines", "2"], [stamp(4.5), stamp(6)]),
        (["--role", "engine", "--rank", "1", "--lines", "1"], [stamp(6)]),
        (["--lines", "3"], [stamp(4.5), stamp(4.5), stamp(6)]),
    ],
)
def test_some_logs(
    run_dir: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: list[str]
) -> None:
    main(["logs", str(run_dir), *options])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--role", "engin"], "has no logs of role engin, rank any; there are: engine-1, main"),
        (
            ["--role", "engine", "--rank", "7"],
            "has no logs of role engine, rank 7; there are: engine-1, main",
        ),
        (["--lines", "-1"], "lines is -1; expected 0 or more"),
    ],
)
def test_logs_that_are_not_there(
    run_dir: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["logs", str(run_dir), *options])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_run_without_logs(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"logs has no logs of role any, rank any; there are: none at all"
    ):
        next(merged_lines(tmp_path / "logs"))


def test_following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gcore_runs.logs._POLL_S", 0.01)
    file = tmp_path / "engine-0.log"
    file.write_text(
        f"{stamp(1)} engine-0 INFO a: 1\n{stamp(2)} engine-0 INFO a: 2\n{stamp(3)} engine-0 INFO a: ha"
    )
    with closing(merged_lines(tmp_path, last=1, follow=True)) as lines:
        assert next(lines).endswith("a: 2")
        with file.open("a") as more:
            more.write("lf\n")
        assert next(lines).endswith("a: half")
        # The file is full: what was still written to it comes before what is in the new one.
        with file.open("a") as more:
            more.write(f"{stamp(4)} engine-0 INFO a: old\n")
        file.rename(tmp_path / "engine-0.log.1")
        file.write_text(f"{stamp(5)} engine-0 INFO a: new\n")
        assert [next(lines)[-3:], next(lines)[-3:]] == ["old", "new"]
        (tmp_path / "engine-1.log").write_text("words\n")
        assert next(lines).endswith(" engine-1 OUT words")


def test_following_ends_with_ctrl_c_and_without_a_word(run_dir: Path) -> None:
    command = [
        Path(sys.executable).with_name("gcore-llm"),
        "logs",
        run_dir,
        "--follow",
        "--role",
        "main",
    ]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A job in the background of a shell begins with Ctrl-C ignored, and so do its children.
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, **pipes, preexec_fn=default) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith("a: starts\n")
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=600)
        finally:
            process.kill()
    assert (process.returncode, err) == (130, "")
    assert out in ("", f"{stamp(4)} main ERROR a: lost\n")


def test_logs_end_in_silence_with_their_reader(run_dir: Path) -> None:
    with (run_dir / "logs" / "main.log").open("a") as file:
        file.writelines(f"{stamp(5)} main INFO a: {i:0100d}\n" for i in range(5000))
    command = [Path(sys.executable).with_name("gcore-llm"), "logs", run_dir]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().endswith(b"b: begins\n")
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


def test_importing_the_reader_is_cheap() -> None:
    code = "import json, sys, gcore_runs.logs; print(json.dumps([*sys.modules]))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"numpy", "torch", "rich", "prometheus_client"} & set(json.loads(result.stdout))


def test_control_characters_from_outside_are_escaped() -> None:
    """A reward's error may hold a response, which could clear the screen or draw over it."""
    assert one_line("no\x1b[2J\r\n  score [/red]") == "no\\x1b[2J score [/red]"
    assert printable("a\tb\nc\x9b1m\u202e") == "a\tb\nc\\x9b1m\\u202e"
    output = StringIO()
    Display(Console(file=output)).say("failed: [/red] \x1b[2J")
    assert output.getvalue() == "failed: [/red] \\x1b[2J\n"


async def test_a_slow_reward_of_a_controller_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    """From a thread of its own, and only while the controller runs; failures are in the log alone."""
    lines: list[str] = []
    caplog.set_level(logging.INFO)
    with announce_slow_calls(lines.append):
        FailureLog().failed(ValueError("no number"))
        await asyncio.to_thread(warn_of_slow_call, "reward 'mine' on prompt 'p'")
        await asyncio.sleep(0)
    warn_of_slow_call("another")
    await asyncio.sleep(0)
    assert lines == ["reward 'mine' on prompt 'p' has been running for 5 s"]
