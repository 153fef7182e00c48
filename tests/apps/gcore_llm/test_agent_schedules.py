"""`gcore-llm train` with agents that work over several steps, in which their engine gets new weights."""

import json
import signal
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Cli, option_set, read_rows, step_rows
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from gcore_ckpt import Checkpointer

# Without an SDK, whose client takes longer to make than a step of training.
AGENT = """
import http.client
import json
import time
from urllib.parse import urlsplit


def agent(task, num_turns=3, pause_s=0.2):
    url = urlsplit(task.base_url)
    headers = {"Authorization": f"Bearer {task.api_key}"}
    connection = http.client.HTTPConnection(url.netloc)
    messages = [{"role": "user", "content": f"{task.row['answer']}: "}]
    length = 0
    for _ in range(num_turns):
        body = json.dumps({"messages": messages, "max_tokens": 24})
        connection.request("POST", url.path + "/chat/completions", body, headers)
        [choice] = json.loads(connection.getresponse().read())["choices"]
        text = choice["message"]["content"]
        length += len(text)
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": " more: "},
        ]
        time.sleep(pause_s)
    connection.close()
    return float(length)


def uneven(task):
    # One agent of a group in three works for longer than a step.
    is_long = task.row["answer"] % 3 == 0 and task.session.session_id.endswith("/1")
    with open("started.txt", "a") as file:
        print(task.session.session_id, file=file)
    return agent(task, 6 if is_long else 1, 0.4 if is_long else 0.02)
"""


@pytest.fixture
def agent_args(cli: Cli, own_args: list[str]) -> list[str]:
    (cli.cwd / "agents.py").write_text(AGENT)
    args = option_set(own_args, "--reward", "")
    args = option_set(args, "--data.max-response-length", "128")
    args = option_set(args, "--data.train-batch-size", "4")
    args = option_set(args, "--trainer.total-training-steps", "5")
    return [
        *args,
        *("--rollout.agent.run", "agents.py:agent", "--algorithm.filter-groups", "False"),
        *("--trainer.test-freq", "100", "--data.val-size", "4"),
    ]


def turn_versions(run: Path) -> list[list[list[int]]]:
    """Return the versions of the tokens of each turn, of each session."""
    sessions: list[list[list[int]]] = []
    for file in sorted((run / "sessions").glob("*.jsonl")):
        for record in read_rows(file):
            turns = [node for node in record["nodes"] if "weight_versions" in node]
            sessions.append([turn["weight_versions"] for turn in turns])
    return sessions


def test_one_step_off_changes_weights_between_sessions(cli: Cli, agent_args: list[str]) -> None:
    """Engine and trainer agree as they do for single turns."""
    cli.ok(*agent_args, "--trainer.schedule", "one_step_off", "--trainer.save-freq", "10")
    run = cli.cwd / "runs/default"
    rows = step_rows(run)
    assert [row["sampling/oldest_version"] for row in rows] == [0, 0, 1, 2, 3]
    for row in rows:
        assert 0 < row["training/rollout_log_probs_diff_max"] < 1e-4
    for turns in turn_versions(run):
        assert len({version for versions in turns for version in versions}) == 1


def check_versions(run: Path) -> None:
    """Versions of a conversation never fall, some have several, and engine and trainer agree on those of one."""
    num_mixed = 0
    for turns in turn_versions(run):
        versions = [version for turn in turns for version in turn]
        assert versions == sorted(versions)
        num_mixed += len(set(versions)) > 1
    assert num_mixed > 0
    # Rows of batches that are by the present weights alone.
    compared = [row for row in step_rows(run) if row["training/rollout_probs_diff_valid"]]
    assert compared
    for row in compared:
        assert row["training/rollout_log_probs_diff_max"] < 1e-4


@pytest.mark.slow
def test_async_changes_weights_in_the_middle_of_sessions(cli: Cli, agent_args: list[str]) -> None:
    """Versions of a conversation never fall, and some conversations are by several."""
    options = ["--trainer.schedule", "async", "--rollout.max-staleness", "2"]
    processes = ["--rollout.num-processes", "1", "--trainer.save-freq", "10"]
    cli.ok(*agent_args, *options, *processes)
    run = cli.cwd / "runs/default"
    rows = step_rows(run)
    staleness = [step - row["sampling/oldest_version"] for step, row in enumerate(rows)]
    assert staleness[0] == 0
    assert 1 <= max(staleness) <= 2
    check_versions(run)


def use_uneven(args: list[str], *options: str) -> list[str]:
    args = option_set(args, "--rollout.agent.run", "agents.py:uneven")
    # Evaluations have sessions of the same names.
    args = option_set(args, "--data.val-size", "0")
    return [*args, "--rollout.partial-rollout", "True", "--trainer.log-samples", "1000", *options]


def list_trained(run: Path) -> list[tuple[int, int]]:
    """Return the prompt index and the index of each response that was trained on."""
    return [(row["prompt_index"], row["index"]) for row in read_rows(run / "samples.jsonl")]


def check_trained_once(run: Path) -> None:
    trained = list_trained(run)
    assert len(trained) == 5 * 4 * 4
    assert len(set(trained)) == len(trained)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [[], ["--controllers", "2"], ["--rollout.num-processes", "2"]], ids=" ".join
)
def test_long_sessions_go_on_in_the_next_step(
    cli: Cli, agent_args: list[str], options: list[str]
) -> None:
    """No step waits for them, each prompt is trained on once, and engine and trainer agree as for single turns."""
    cli.ok(*use_uneven(agent_args, "--trainer.save-freq", "10"), *options)
    run = cli.cwd / "runs/default"
    check_trained_once(run)
    rows = step_rows(run)
    assert max(row["sampling/unfinished_groups"] for row in rows) > 0
    check_versions(run)
    spans = [
        row["weight_version"] - row["oldest_version"] for row in read_rows(run / "samples.jsonl")
    ]
    assert max(spans) > 0
    # No session is played twice.
    started = (cli.cwd / "started.txt").read_text().split()
    assert len(set(started)) == len(started)


def save_mixture(path: Path, tiny: Path) -> None:
    """Write a mixture of experts with the tokenizer of the tiny model."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3MoeConfig(
        **heads,
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


@pytest.mark.slow
def test_what_is_finished_outlives_a_run_that_is_killed(
    cli: Cli, agent_args: list[str], tiny: Path
) -> None:
    """With the experts that tokens passed through in the engine, also of sessions over several steps."""
    save_mixture(cli.cwd / "mixture", tiny)
    args = option_set(agent_args, "--model", str(cli.cwd / "mixture"))
    args = use_uneven(args, "--trainer.save-freq", "1", "--actor.router-replay", "R3")
    run = cli.cwd / "runs/default"

    def has_mixed_session() -> bool:
        return any(
            len({version for turn in turns for version in turn}) > 1 for turns in turn_versions(run)
        )

    command = cli.start(*args)
    command.wait_until(has_mixed_session)
    command.send(signal.SIGKILL)
    assert command.wait().code == -signal.SIGKILL
    finished: dict[str, int] = {}
    for file in (run / "sessions").glob("*.jsonl"):
        for record in read_rows(file):
            finished[record["key"].split()[0]] = int(file.name[:8])
            turns = [node for node in record["nodes"] if "log_probs" in node]
            num_routed = sum(len(node["routed_experts"] or ()) for node in turns)
            assert num_routed == sum(len(n["token_ids"]) for n in record["nodes"]) - 1
    reached = max(Checkpointer(run / "checkpoints").steps())
    num_before = len((cli.cwd / "started.txt").read_text().split())
    cli.ok(*args)
    check_trained_once(run)
    again = (cli.cwd / "started.txt").read_text().split()[num_before:]
    assert not {name for name, step in finished.items() if step <= reached} & set(again)
    # Those that were running are played again.
    assert {f"{index}/{number}" for index, number in list_trained(run)} & set(again)


@pytest.mark.slow
def test_sessions_are_simulated_as_a_journal_has_them(cli: Cli, agent_args: list[str]) -> None:
    args = option_set(agent_args, "--trainer.total-training-steps", "6")
    cli.ok(*args, "--trainer.save-freq", "10")
    cli.ok("simulate", "--calibrate", "runs/default", "--warmup-steps", "1")
    settings = tomllib.loads((cli.cwd / "runs/default/simulate.toml").read_text())
    sessions = settings["sessions"]
    assert sessions["turns"] == {"median": 3.0, "sigma": 0.0}
    # Agents sleep for 0.2 s after each turn.
    assert 0.2 <= sessions["tool_s"]["median"] < 2
    cli.ok("simulate", "--config", "runs/default/simulate.toml", "--json", "figures.json")
    measured = [row["timing_s/gen"] for row in step_rows(cli.cwd / "runs/default")][1:]
    steps = json.loads((cli.cwd / "figures.json").read_text())["steps"]
    simulated = [step["metrics"]["timing_s/gen"] for step in steps]
    # Of the same machine, whose neighbours are busy or not: how close it is, docs/how-to/simulate.md says.
    assert min(measured) / 2 < np.mean(simulated) < max(measured) * 2
    assert min(simulated) > 0.6


def test_a_run_with_an_agent_in_simulated_time(cli: Cli, agent_args: list[str]) -> None:
    """It needs a model of the sessions."""
    args = ["simulate", *agent_args, "--sim.devices", "8"]
    expected = "expected the schedule 'sync', single turns or sim.sessions.turns, and no images"
    assert expected in " ".join(cli.refused(*args).split())
    sessions = ["--sim.sessions.turns.median", "3", "--sim.sessions.start-s", "100"]
    cli.ok(*args, *sessions)
    for row in step_rows(cli.cwd / "runs/default"):
        assert row["timing_s/gen"] > 100
