"""Wrong input of `sft`, `reward-model` and `dpo`: one message, exit code 2, and nothing on disk."""

import json
import socket
from pathlib import Path

import pytest
from command_line import Cli, write_rows
from finetune_cases import TEMPLATE, pairs, with_template

GOOD = '{"prompt": "1+1=", "completion": "2"}\n'
CHAT = '[{"role": "user", "content": "1+1="}]'
COMMANDS = ("sft", "reward-model", "dpo")


def job(command: str, model: Path | str, *options: str) -> list[str]:
    files = ("--data.train-files", "rows.jsonl", "--data.max-length", "32")
    return [command, "--threads", "1", "--device", "cpu", "--model", str(model), *files, *options]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--optim.lr", "-1"], "lr is -1.0; expected a finite number above 0"),
        (
            ["--optim.lr-warmup-steps-ratio", "2"],
            "optim.lr_warmup_steps_ratio is 2.0; expected a number in [0, 1]",
        ),
        (
            ["--trainer.total-epochs", "0"],
            "trainer.total_epochs is 0.0; expected a finite number above 0",
        ),
        (["--data.max-length", "1"], "data.max_length is 1; expected 2 or more"),
        (["--data.train-batch-sise", "1"], "--data.train-batch-size"),
        (["--max-token-len", "31"], "max_token_len is 31; expected at least "),
        (["--name", "a/b"], "name is 'a/b'; expected a plain folder name"),
        (["--task.name", "chain_sum"], "expected one source of rows"),
        (["--data.train-files", "nowhere.jsonl"], "data file nowhere.jsonl does not exist"),
        (
            ["--model", "nowhere"],
            "model is 'nowhere'; expected a Hugging Face folder with config.json",
        ),
        (["--config", "nowhere.toml"], "config is nowhere.toml: No such file"),
        (
            ["--trainer.prometheus=-1"],
            "trainer.prometheus is '-1'; expected HOST:PORT or PORT, from 1 to 65535, or nothing",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_options(cli: Cli, tiny: Path, options: list[str], expected: str) -> None:
    assert expected in " ".join(cli.refused(*job("sft", tiny), *options).split())
    assert list(cli.cwd.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "options", "expected"),
    [
        ("dpo", ["--loss.beta", "0"], "beta is 0.0; expected a finite number above 0"),
        ("dpo", ["--loss.loss-type", "orpo"], "orpo"),
        (
            "dpo",
            ["--max-token-len", "63"],
            "max_token_len is 63; expected at least 2 * data.max_length = 64",
        ),
        (
            "reward-model",
            ["--loss.center-rewards-coefficient", "-1"],
            "center_rewards_coefficient is -1.0",
        ),
        (
            "sft",
            ["--optim.lr-warmup-steps", "3", "--optim.lr-warmup-steps-ratio", "0.1"],
            "expected 0 with optim.lr_warmup_steps 3",
        ),
    ],
)
def test_options_of_one_command(
    cli: Cli, tiny: Path, command: str, options: list[str], expected: str
) -> None:
    assert expected in " ".join(cli.refused(*job(command, tiny), *options).split())


def test_config_file_of_another_command(cli: Cli, tiny: Path) -> None:
    (cli.cwd / "s.toml").write_text('command = "dpo"\n')
    assert "s.toml: command is 'dpo'" in cli.refused(*job("sft", tiny), "--config", "s.toml")
    (cli.cwd / "s.toml").write_text("[optim]\nlearning_rate = 1\n")
    assert "s.toml: unknown field optim.learning_rate; " in cli.refused(
        *job("sft", tiny), "--config", "s.toml"
    )


def test_rows_without_a_model_and_a_model_without_rows(cli: Cli, tiny: Path) -> None:
    write_rows(cli.cwd / "rows.jsonl", [json.loads(GOOD)])
    rows = ("--data.train-files", "rows.jsonl")
    assert "model is not set; expected a Hugging Face folder, or a model" in cli.refused(
        "sft", "--recipe", "own_data", *rows
    )
    assert "data.train_files is not set" in cli.refused("sft", "--model", tiny)
    assert "worked examples (chain_sum), or rows of your own" in cli.refused(
        "dpo", "--task.name", "leg_counting"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n", "rows.jsonl has no rows"),
        (GOOD + '{"prompt": ', "rows.jsonl:2 is not JSON"),
        (
            GOOD + '{"question": "a"}',
            "rows.jsonl: row 2 has the columns question; expected messages, or prompt and completion",
        ),
        (
            GOOD + '{"prompt": "a"}',
            "rows.jsonl: row 2 has the columns prompt; expected messages, or prompt and completion",
        ),
        (
            GOOD + '{"prompt": "a", "completion": 7}',
            "rows.jsonl: row 2: completion is 7; expected text, or a list of messages",
        ),
        (GOOD + '{"prompt": "a", "completion": ""}', "rows.jsonl: row 2 has an empty completion"),
        (GOOD + '{"text": ""}', "rows.jsonl: row 2 is empty"),
        (GOOD + '{"text": 7}', "rows.jsonl: row 2: text is 7; expected text"),
        (
            GOOD + '{"text": "a\\ud800"}',
            "rows.jsonl: row 2: text has a lone surrogate, '\\ud800' at character 2",
        ),
        (
            GOOD + '{"prompt": "a", "completion": "\\udfff"}',
            "rows.jsonl: row 2: completion has a lone surrogate",
        ),
        (
            GOOD + '{"messages": [{"role": "assistant", "content": null}]}',
            "rows.jsonl: row 2: messages: message 1.content is None; expected text",
        ),
        (
            GOOD
            + '{"messages": [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}]}',
            "rows.jsonl: row 2: messages: message 1.content has the part {'type': 'audio', 'audio': 'a.wav'}; expected",
        ),
        (
            GOOD + '{"messages": [{"role": "user", "content": "a"}], "tools": "{"}',
            "rows.jsonl: row 2: tools is '{'; expected a list of JSON schemas",
        ),
        (
            GOOD + '{"messages": "hi"}',
            "rows.jsonl: row 2: messages is 'hi'; expected a list of messages with role and content",
        ),
        (
            GOOD + f'{{"messages": {CHAT}}}',
            "rows.jsonl: row 2 holds chat messages: the model's tokenizer has no chat",
        ),
        (
            '{"text": "' + "x" * 32 + '"}',
            "no row is left to train on: 1 are longer than data.max_length=32 tokens",
        ),
    ],
)
def test_rows_to_imitate(cli: Cli, tiny: Path, text: str, expected: str) -> None:
    (cli.cwd / "rows.jsonl").write_text(text)
    assert expected in cli.refused(*job("sft", tiny))
    assert not (cli.cwd / "runs").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"prompt": "a", "chosen": "b"}',
            "row 1 has the columns prompt, chosen; expected chosen and rejected, and prompt",
        ),
        (
            '{"prompt": "a", "chosen": "b", "rejected": 7}',
            "row 1: rejected is 7; expected text, or a list of messages",
        ),
        (
            '{"chosen": "b", "rejected": 7}',
            "row 1: rejected is 7; expected text after a prompt, or conversations",
        ),
        ('{"prompt": "a", "chosen": "b", "rejected": ""}', "row 1 has an empty rejected"),
        (
            '{"prompt": "a", "chosen": "b", "rejected": "b"}',
            "no row is left to train on: 0 are longer than data.",
        ),
    ],
)
def test_pairs(cli: Cli, tiny: Path, text: str, expected: str) -> None:
    (cli.cwd / "rows.jsonl").write_text(text)
    assert expected in cli.refused(*job("dpo", tiny))
    assert not (cli.cwd / "runs").exists()


def test_equal_pairs_are_left_out_and_counted(cli: Cli, tiny: Path) -> None:
    equal = {"prompt": "1+1=", "chosen": "2", "rejected": "2"}
    write_rows(cli.cwd / "rows.jsonl", [*pairs(20, seed=0), equal, equal])
    out = cli.ok(*job("reward-model", tiny, "--trainer.total-training-steps", "1"))
    assert "left out 2 rows whose chosen and rejected answers are equal" in out
    assert "18 training rows, 2 held out" in out


def test_port_in_use(cli: Cli, tiny: Path) -> None:
    """Found before anything is written."""
    write_rows(cli.cwd / "rows.jsonl", [json.loads(GOOD)] * 20)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = cli.refused(*job("sft", tiny), "--trainer.prometheus", str(port))
    assert f"trainer.prometheus is '127.0.0.1:{port}'; expected a free port" in error
    assert not (cli.cwd / "runs").exists()


def test_conversations_that_the_template_cannot_mark(cli: Cli, tiny: Path) -> None:
    rows = cli.cwd / "rows.jsonl"
    rows.write_text(f'{{"messages": {CHAT}}}')
    plain = with_template(tiny, cli.cwd / "plain", TEMPLATE)
    assert "row 1 has no message of the assistant to learn from" in cli.refused(*job("sft", plain))
    rows.write_text('{"prompt": "1+1=", "completion": "2"}')
    counting = with_template(tiny, cli.cwd / "counting", "{{ messages | length }}" + TEMPLATE)
    error = cli.refused(*job("sft", counting))
    assert "mark them in the template with {% generation %} and {% endgeneration %}" in error
    picky = with_template(tiny, cli.cwd / "picky", "{{ raise_exception('no roles') }}")
    assert "the chat template refuses the messages: no roles" in cli.refused(*job("sft", picky))


def test_rows_too_long_for_the_model(cli: Cli, tiny: Path) -> None:
    """The tiny model takes 512 tokens."""
    write_rows(cli.cwd / "rows.jsonl", [{"text": "x" * 512}])
    error = cli.refused(*job("sft", tiny, "--data.max-length", "600"))
    assert "the longest row has 513 tokens; expected at most 512" in error


def test_changed_settings_on_resume(cli: Cli, tiny: Path) -> None:
    write_rows(cli.cwd / "rows.jsonl", [{"text": "abc"}])
    args = job("sft", tiny, "--trainer.total-training-steps", "1")
    cli.ok(*args)
    error = cli.refused(*args, "--optim.lr", "1e-4")
    assert "runs/sft was started with other settings (optim.lr: 1e-05 -> 0.0001)" in error
    write_rows(cli.cwd / "rows.jsonl", [*pairs(3, seed=0)])
    error = cli.refused(*job("dpo", tiny, "--name", "sft"))
    assert "runs/sft is a run of the command sft; expected one of dpo" in error


@pytest.mark.parametrize("command", COMMANDS)
def test_help_documents_every_option(cli: Cli, command: str) -> None:
    text = cli.ok(command, "--help")
    for option in (
        "--data.max-length",
        "--optim.lr-scheduler-type",
        "--trainer.total-epochs",
        "--max-token-len",
    ):
        assert option in text
    assert "--command" not in text
