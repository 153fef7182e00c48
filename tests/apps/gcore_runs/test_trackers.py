"""Trackers with their real clients, without a network: the same numbers as in metrics.jsonl, once, in one run."""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb_files import records

from gcore_runs import BaseRunConfig, Display, Supervisor, UserError, merge
from gcore_runs.run_folder import MetricsWriter, RunFolder, read_jsonl
from gcore_runs.trackers.background import Background, start_tracker
from gcore_runs.trackers.base import TrackedRun, Tracker

SAMPLE = {
    "prompt": "1 + 1 =",
    "response": "2 <b>",
    "score": 1.0,
    "parts": {"format": 0.5},
    "is_filtered": False,
}
IMAGE = np.full((4, 4, 3), 200, np.uint8)

Seen = dict[str, list[tuple[int, float]]]
"""Steps and values by metric; of images and samples the number of them in place of a value."""


def run_of(folder: Path) -> RunFolder:
    run = RunFolder(folder / "runs/one")
    run.path.mkdir(parents=True, exist_ok=True)
    return run


def write(
    folder: Path, tracker: str, first_step: int, last_step: int, *, end: type[BaseException] | None
) -> None:
    """Record the steps after the first one, as a run that ended by an exception or not, with what follows a step."""
    run = run_of(folder)
    tracked = TrackedRun(
        project="digits",
        name="one",
        run_id="0123456789ab",
        folder=run.path,
        config={"seed": 3, "data": {"n": 2}},
    )
    with (
        suppress(KeyboardInterrupt),
        start_tracker(tracker, tracked, lambda line: pytest.fail(line)) as follower,
        MetricsWriter(run, last_step=first_step, tensorboard=True, trackers=[follower]) as writer,
    ):
        if first_step == 0:
            writer.write_images(0, {"images/grid": IMAGE})
        for step in range(first_step + 1, last_step + 1):
            writer.write(
                step,
                {"critic/score/mean": step / 8, "val/a/pass@4": 0.5}
                | {f"m/{i}": 1.0 for i in range(120)},
            )
            writer.write_samples(step, [SAMPLE, SAMPLE])
            writer.write_images(step, {"images/grid": IMAGE})
        if end is not None:
            raise end


def of_wandb(run: Path) -> Seen:
    import wandb  # pyright: ignore[reportMissingImports]

    # Its service may still be writing.
    wandb.teardown()
    found = [
        record
        for file in sorted(run.glob("wandb/offline-run-*/*.wandb"))
        for record in records(file)
    ]
    runs = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert {(each.project, each.display_name, each.run_id) for each in runs} == {
        ("digits", "one", "0123456789ab")
    }
    seen: Seen = {}
    for record in found:
        if record.WhichOneof("record_type") == "history":
            row = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            for name, value in row.items():
                if name in ("images/grid/path", "samples/nrows"):
                    seen.setdefault(name.rpartition("/")[0], []).append(
                        (row["step"], 1 if name[0] == "i" else value)
                    )
                elif isinstance(value, int | float):
                    seen.setdefault(name, []).append((row["step"], value))
    return seen


def of_trackio(run: Path) -> Seen:
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    assert SQLiteStorage.get_runs("digits") == ["one-012345"]
    seen: Seen = {}
    for row in SQLiteStorage.get_logs("digits", "one-012345"):
        for name, value in row.items():
            if name == "samples":
                seen.setdefault(name, []).append((row["step"], len(value["_value"])))
            elif name == "images/grid":
                seen.setdefault(name, []).append((row["step"], 1))
            elif isinstance(value, float):
                seen.setdefault(name, []).append((row["step"], value))
    return seen


def of_mlflow(run: Path) -> Seen:
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    client: Any = MlflowClient()
    [found] = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (found.info.run_name, found.info.status) == ("one", "FINISHED")
    assert {name: found.data.params[name] for name in ("seed", "data.n")} == {
        "seed": "3",
        "data.n": "2",
    }
    seen: Seen = {}
    for name in found.data.metrics:
        history = client.get_metric_history(found.info.run_id, name)
        seen[name.replace("_at_", "@")] = [(point.step, point.value) for point in history]
    for artifact in client.list_artifacts(found.info.run_id, "samples"):
        table = json.loads(
            Path(client.download_artifacts(found.info.run_id, artifact.path)).read_text()
        )
        step = int(Path(artifact.path).stem.removeprefix("step-"))
        assert dict(zip(table["columns"], table["data"][0], strict=True))["response"] == "2 <b>"
        seen.setdefault("samples", []).append((step, len(table["data"])))
    images = [
        file.path
        for file in client.list_artifacts(found.info.run_id, "images")
        if file.path.endswith(".png")
    ]
    seen["images/grid"] = sorted((int(path.split("step")[1].strip("+%")[0]), 1) for path in images)
    return seen


def of_swanlab(run: Path) -> Seen:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record  # pyright: ignore[reportMissingImports]
    from swanlab.sdk.internal.core_python.store import DataStoreReader  # pyright: ignore[reportMissingImports]

    seen: Seen = {}
    files = sorted(run.glob("swanlog/run-*/run-0123456789ab.swanlab"))
    assert len(files) == 2
    for file in files:
        reader: Any = DataStoreReader()
        reader.open(file)
        for record in map(Record.FromString, reader):
            if record.HasField("scalar"):
                seen.setdefault(record.scalar.key, []).append(
                    (record.scalar.step, record.scalar.value.number)
                )
            elif record.HasField("media"):
                items = len(record.media.value.items)
                seen.setdefault(record.media.key, []).append((record.media.step, items))
        reader.close()
    assert "--- response ---\n2 <b>" in next(run.glob("swanlog/run-*/media/**/*.txt")).read_text()
    return seen


READERS: dict[str, Callable[[Path], Seen]] = {
    "wandb": of_wandb,
    "trackio": of_trackio,
    "mlflow": of_mlflow,
    "swanlab": of_swanlab,
}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the libraries that keep everything in files."""
    variables = {
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
        "SWANLAB_ROOT": str(tmp_path / "swanlab"),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "DO_NOT_TRACK": "true",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # Trackio reads its variable when it is imported, which another test's library may have done.
    for module in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, module)


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("tracker", READERS)
def test_a_resumed_run_is_the_same_one_and_no_step_is_shown_twice(
    tracker: str, tmp_path: Path
) -> None:
    pytest.importorskip(tracker)
    write(tmp_path, tracker, 0, 3, end=KeyboardInterrupt)
    # Its last checkpoint was after step 2: the third step is repeated.
    write(tmp_path, tracker, 2, 4, end=None)
    run = run_of(tmp_path)
    rows = read_jsonl(run.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    seen = READERS[tracker](run.path)
    for name in ("critic/score/mean", "val/a/pass@4", "m/0", "m/119"):
        assert seen[name] == [(row["step"], row[name]) for row in rows]
    assert seen["samples"] == [(step, 2) for step in (1, 2, 3, 4)]
    assert seen["images/grid"] == [(step, 1) for step in (0, 1, 2, 3, 4)]
    samples = read_jsonl(run.training_samples)
    assert samples == [{"step": step, **SAMPLE} for step in (1, 2, 3, 4) for _ in range(2)]
    board = EventAccumulator(str(run.tensorboard))
    board.Reload()
    texts = board.Tensors("samples/0/text_summary")
    # Files of the same second are read in any order.
    texts.sort(key=lambda event: event.step)
    assert [event.step for event in texts] == [1, 2, 3, 4]
    assert b"--- response ---\n2 &lt;b&gt;</pre>" in texts[0].tensor_proto.string_val[0]


class Broken(Tracker):
    """Fails at every step, and takes images."""

    def __init__(self) -> None:
        self.image_steps: list[int] = []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        del metrics
        raise ConnectionError(f"no answer\nat step {step}")

    def write_images(self, step: int, images: object) -> None:
        del images
        self.image_steps.append(step)

    def __exit__(self, *error: object) -> None:
        raise ConnectionError("no answer at the end")


def test_a_tracker_that_fails_is_reported_once_and_ends_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    broken = Broken()
    with (
        Background(broken, name="mlflow", say=lines.append) as follower,
        MetricsWriter(
            run_of(tmp_path), last_step=0, tensorboard=False, trackers=[follower]
        ) as writer,
    ):
        for step in (1, 2, 3):
            writer.write(step, {"m": 1.0})
            writer.write_images(step, {"i": IMAGE})
    assert lines == [
        "warning: mlflow failed, and the run continues without what it refuses: no answer at step 1; metrics.jsonl has "
        "everything"
    ]
    assert broken.image_steps == [1, 2, 3]
    assert len(read_jsonl(run_of(tmp_path).metrics)) == 3


def test_a_library_that_is_missing_is_found_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = merge(BaseRunConfig(threads=1), {"trainer": {"trackers": ["mlflow"]}})
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError) as error, Supervisor(config, app="gcore-runs", display=Display()):
        pytest.fail("it started")
    assert str(error.value) == (
        "trainer.trackers has 'mlflow'; expected its library to be installed: pip install 'gcore-runs[mlflow]'"
    )


def test_a_tracker_that_does_not_start_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracked = TrackedRun(project="p", name="n", run_id="i", folder=tmp_path, config={})
    with pytest.raises(
        UserError, match=r"trainer.trackers has 'wandb', which does not start: .*; expected a login"
    ):
        start_tracker("wandb", tracked, print)
