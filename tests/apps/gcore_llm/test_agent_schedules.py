"""`gcore-llm train` with agents whose engine gets new weights while they work, and the schedules that refuse them."""

from pathlib import Path

import pytest
from command_line import Cli, option_set, read_rows, step_rows

# Without an SDK, whose client takes longer to make than a step of training.
AGENT = """
import http.client
import json
import time
from urllib.parse import urlsplit


def agent(task):
    url = urlsplit(task.base_url)
    headers = {"Authorization": f"Bearer {task.api_key}"}
    connection = http.client.HTTPConnection(url.netloc)
    messages = [{"role": "user", "content": f"{task.row['answer']}: "}]
    length = 0
    for _ in range(3):
        body = json.dumps({"messages": messages, "max_tokens": 24})
        connection.request("POST", url.path + "/chat/completions", body, headers)
        [choice] = json.loads(connection.getresponse().read())["choices"]
        text = choice["message"]["content"]
        length += len(text)
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": " more: "},
        ]
        time.sleep(0.2)
    connection.close()
    return float(length)
"""


@pytest.fixture
def agent_args(cli: Cli, own_args: list[str]) -> list[str]:
    (cli.cwd / "agents.py").write_text(AGENT)
    args = option_set(own_args, "--reward", "")
    args = option_set(args, "--data.max-response-length", "128")
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
    num_mixed = 0
    for turns in turn_versions(run):
        versions = [version for turn in turns for version in turn]
        assert versions == sorted(versions)
        num_mixed += len(set(versions)) > 1
    assert num_mixed > 0
    # Rows of batches that are by the present weights alone.
    compared = [row for row in rows if row["training/rollout_probs_diff_valid"]]
    assert compared
    for row in compared:
        assert row["training/rollout_log_probs_diff_max"] < 1e-4


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["train", "--rollout.partial-rollout", "True"],
            "rollout.partial_rollout is true; expected false with several turns",
        ),
        (
            [
                *("train", "--rollout.tail-batching", "True"),
                *("--rollout.over-sample-rate", "0.5"),
            ],
            "rollout.tail_batching is true; expected false with several turns",
        ),
        (["simulate", "train"], "rollout makes several turns"),
    ],
)
def test_what_agents_do_not_do(
    cli: Cli, agent_args: list[str], options: list[str], expected: str
) -> None:
    # Without the command itself.
    args = [*options, *agent_args[1:]]
    assert expected in " ".join(cli.refused(*args).split())
