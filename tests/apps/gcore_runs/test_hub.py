"""Models and data by name, of a Hub on this machine: downloaded once, found without a network, pinned to a commit."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hub_server import StandInHub, stand_in_hub

from gcore_llm.tiny_model import make_tiny_model
from gcore_runs import UserError, model_folder
from gcore_runs.data.hub import DatasetName

pytestmark = pytest.mark.slow

CARD = """---
configs:
- {config_name: main, data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]}
- {config_name: hard, data_files: [{split: train, path: hard/train-*}]}
---
"""

CALLS = """
import json, sys
from gcore_llm.config import TrainConfig
from gcore_runs import UserError, merge, model_folder, open_rows, resolve

for settings in json.load(sys.stdin):
    try:
        config = resolve(merge(TrainConfig(device="cpu", name="named"), settings))
        found = {"model": config.model, "files": config.data.train_files}
        found["judges"] = {name: judge.path for name, judge in config.reward_model.judges.items()}
        found["folder"] = sorted(file.name for file in model_folder(config.model).iterdir())
        files = [file for source in config.data.train_files for file in open_rows(source)]
        found["rows"] = [dict(row) for file in files for row in file.rows]
    except UserError as error:
        found = {"error": str(error)}
    print(json.dumps(found))
"""


def data_set(folder: Path, *answers: str) -> Path:
    for name, own in (("main/train", answers), ("main/test", ("9",)), ("hard/train", ("7",))):
        file = folder / f"{name}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(
            pyarrow.table({"prompt": [f"{a}=" for a in own], "answer": own}), file
        )
    (folder / "README.md").write_text(CARD)
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandInHub]:
    folder = tmp_path_factory.mktemp("repositories")
    make_tiny_model(folder / "tiny", seed=0)
    with stand_in_hub() as hub:
        hub.push("models/org/tiny", folder / "tiny")
        hub.push("datasets/org/sums", data_set(folder / "sums", "1", "2"))
        yield hub


def resolved(
    hub: StandInHub, home: Path, *settings: dict[str, Any], **variables: str
) -> list[dict[str, Any]]:
    """Resolve settings one after the other in a process that knows this Hub alone."""
    environment = {**os.environ, **hub.environment(home), **variables}
    call = [sys.executable, "-c", CALLS]
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        call, input=json.dumps(settings), env=environment, cwd=home, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_by_name_and_then_without_a_network(hub: StandInHub, tmp_path: Path) -> None:
    [model], [data] = (list(hub.commits[name]) for name in ("models/org/tiny", "datasets/org/sums"))
    settings = {
        "model": "org/tiny",
        "data": {
            "train_files": ["hf://org/sums/main", "hf://org/sums/hard:train"],
            "val_files": ["hf://org/sums/main:test"],
        },
        "reward_model": {"judges": {"style": {"path": "org/tiny", "weight": 2.0}}},
    }
    [first] = resolved(hub, tmp_path, settings)
    assert first["model"] == f"org/tiny@{model}"
    assert first["judges"] == {"style": f"org/tiny@{model}"}
    assert first["files"] == [f"hf://org/sums@{data}/main", f"hf://org/sums@{data}/hard:train"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(first["folder"])
    assert [row["answer"] for row in first["rows"]] == ["1", "2", "7"]
    judges = {"style": {"path": first["judges"]["style"]}}
    pinned = {
        "model": first["model"],
        "data": {"train_files": first["files"]},
        "reward_model": {"judges": judges},
    }
    num_requests = len(hub.requests)
    assert resolved(hub, tmp_path, pinned) == [first], "what is pinned is not looked up again"
    assert hub.requests[num_requests:] == []
    for variables in ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}):
        assert resolved(hub, tmp_path, settings, pinned, **variables) == [first, first]


def test_a_moved_revision_does_not_change_a_run(hub: StandInHub, tmp_path: Path) -> None:
    settings = {"model": "org/tiny", "data": {"train_files": ["hf://org/sums/main"]}}
    [first] = resolved(hub, tmp_path, settings)
    run = tmp_path / "runs/named"
    (run / "checkpoints/step-1").mkdir(parents=True)
    text = f'model = "{first["model"]}"\ndtype = "float32"\n[data]\ntrain_files = {json.dumps(first["files"])}\n'
    (run / "config.toml").write_text(text)
    moved = hub.push("models/org/tiny", next(iter(hub.commits["models/org/tiny"].values())))
    newer = hub.push("datasets/org/sums", data_set(tmp_path / "newer", "3"))
    other = {**settings, "name": "other"}
    resumed, fresh, old = resolved(
        hub, tmp_path, settings, other, {"model": first["model"], "name": "other"}
    )
    assert resumed == first
    assert fresh["model"] == f"org/tiny@{moved}"
    assert fresh["files"] == [f"hf://org/sums@{newer}/main"]
    assert [row["answer"] for row in fresh["rows"]] == ["3"]
    assert old["model"] == first["model"]
    without = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert resolved(hub, tmp_path, settings, other, **without) == [first, fresh], (
        "of two commits, each finds its own"
    )


def test_what_the_hub_does_not_have(hub: StandInHub, tmp_path: Path) -> None:
    def of(source: str) -> dict[str, Any]:
        return {"data": {"train_files": [source]}}

    (tmp_path / "folder/model").mkdir(parents=True)
    cases = [
        (
            {"model": "org/missing"},
            "model is 'org/missing'; expected an existing folder, or a model on the Hub: there is none",
        ),
        (
            {"model": "org/tiny@v9"},
            "model is 'org/tiny@v9'; expected an existing folder, or a model on the Hub: it has no rev",
        ),
        (
            {"critic": {"model": "org/no"}, "algorithm": {"adv_estimator": "gae"}},
            "critic.model is 'org/no'; expected an existing folder, or a model on the Hub",
        ),
        (
            of("hf://org/missing"),
            "data.train_files is 'hf://org/missing'; expected a data set on the Hub: there is none",
        ),
        (
            of("hf://org/sums/easy"),
            "data.train_files is 'hf://org/sums/easy'; expected a data set on the Hub: ValueError: ",
        ),
        (
            of("hf://org/sums/main:dev"),
            "data.train_files is 'hf://org/sums/main:dev'; expected a data set on the Hub: ",
        ),
        (
            of("hf://sums"),
            "data.train_files is 'hf://sums'; expected hf://NAMESPACE/NAME[@REVISION][/SUBSET][:SPLIT], such",
        ),
    ]
    found = resolved(hub, tmp_path, *(settings for settings, _ in cases))
    for (_, expected), outcome in zip(cases, found, strict=True):
        assert outcome["error"].startswith(expected)
        assert "\n" not in outcome["error"]
    away = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    [model, data] = resolved(hub, tmp_path, {"model": "org/tiny"}, of("hf://org/sums/main"), **away)
    for outcome in (model, data):
        assert outcome["error"].endswith(
            "on the Hub: the Hub cannot be reached, and it was not downloaded before"
        )


def test_the_command_of_the_page_runs(hub: StandInHub, tmp_path: Path) -> None:
    """It trains on what the Hub has, in epochs, and its run continues with that after both have moved."""
    page = (Path(__file__).parents[3] / "docs/how-to/data.md").read_text()
    command = shlex.split(
        re.findall(r"```console\n(.*?)```", page, flags=re.DOTALL)[0].replace("\\\n", " ")
    )
    rows = [{"question": f"{i}+1=", "answer": f"{i} and 1\n#### {i + 1}"} for i in range(3)]
    for name in ("main/train", "main/test"):
        file = tmp_path / f"sums/{name}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    (tmp_path / "sums/README.md").write_text(CARD.partition("- {config_name: hard")[0] + "---\n")
    tiny = next(iter(hub.commits["models/org/tiny"].values()))
    pinned = (
        hub.push("models/Qwen/Qwen2.5-0.5B-Instruct", tiny),
        hub.push("datasets/openai/gsm8k", tmp_path / "sums"),
    )
    assert command[0] == "gcore-llm"
    small = ["--data.train-batch-size", "2", "--rollout.n", "2", "--data.max-response-length", "4"]
    small += [
        "--algorithm.filter-groups",
        "False",
        "--threads",
        "1",
        "--device",
        "cpu",
        "--trainer.total-epochs",
    ]

    def run(epochs: str) -> dict[str, Any]:
        program = [
            sys.executable,
            "-c",
            "from gcore_llm.cli import main; main()",
            *command[1:],
            *small,
            epochs,
        ]
        environment = os.environ | hub.environment(tmp_path / "home")
        done = subprocess.run(
            program, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        # Code 3: a random model is never right.
        assert done.returncode == 3, done.stdout + done.stderr
        return tomllib.loads((tmp_path / "runs/default/config.toml").read_text())

    first = run("1")
    assert first["model"] == f"Qwen/Qwen2.5-0.5B-Instruct@{pinned[0]}"
    assert first["data"]["train_files"] == [f"hf://openai/gsm8k@{pinned[1]}/main:train"]
    assert first["data"]["val_files"] == [f"hf://openai/gsm8k@{pinned[1]}/main:test"]
    assert first["trainer"]["total_training_steps"] == 2, "three rows, two a step"
    hub.push("models/Qwen/Qwen2.5-0.5B-Instruct", tmp_path)
    hub.push("datasets/openai/gsm8k", tmp_path)
    num_requests = len(hub.requests)
    further = run("2")
    assert hub.requests[num_requests:] == [], (
        "neither for what is pinned, nor by a library on its own"
    )
    assert further["trainer"].pop("total_training_steps") == 3
    assert further["trainer"].pop("total_epochs") == 2 * first["trainer"].pop("total_epochs")
    del first["trainer"]["total_training_steps"]
    assert further == first


def test_folders_win_and_names_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org/tiny").mkdir(parents=True)
    for folder in ("org/tiny", "missing", "./org/none", "/tmp/org", "runs/a/export"):
        assert model_folder(folder) == Path(folder)
    name = DatasetName.parse("hf://open-ai/gsm8k@refs-1/main:train", setting="data.train_files")
    assert vars(name) == {
        "repo": "open-ai/gsm8k",
        "revision": "refs-1",
        "subset": "main",
        "split": "train",
    }
    for text in ("hf://a/b", "hf://a/b:test", "hf://a/b/c", "hf://a/b@v1/c:test"):
        assert str(DatasetName.parse(text, setting="data.train_files")) == text
    for text in ("hf://a", "hf://a/b:train[:5]", "hf://datasets:a/b"):
        with pytest.raises(UserError, match="such as hf://openai/gsm8k/main:train"):
            DatasetName.parse(text, setting="data.train_files")
