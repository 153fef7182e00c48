"""`gcore-llm train` with agents that show pictures to a vision-language model, also in later turns."""

from pathlib import Path

import pytest
from command_line import Cli, option_set, read_rows, step_rows, write_rows
from tiny_vision_model import Reference, save_vision_model

AGENTS = '''
import base64
import io

import openai
import PIL.Image

SIZES = {"red": (56, 84), "green": (84, 56), "blue": (84, 84)}


def show(colour, words):
    """A message with a picture of one colour, and words."""
    file = io.BytesIO()
    PIL.Image.new("RGB", SIZES[colour], colour).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": words}]
    return {"role": "user", "content": parts}


async def ask(client, messages):
    reply = await client.chat.completions.create(model="any", messages=messages, max_tokens=6)
    return reply.choices[0].message.content or ""


async def shows_two(task):
    """Shows a picture, then another, and goes back to show a third in place of the second."""
    colours = [task.row["colour"], *(c for c in SIZES if c != task.row["colour"])]
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        messages = [show(colours[0], "Colour?")]
        said = await ask(client, messages)
        messages.append({"role": "assistant", "content": said})
        for colour in colours[1:]:
            said += await ask(client, [*messages, show(colour, "And this?")])
    return sum(letter in said for letter in task.row["colour"]) / len(task.row["colour"])


async def differs(task):
    """Each session of a group shows another picture first."""
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        number = int(task.session.session_id.partition("/")[2] or 0) if "greedy" not in task.session.session_id else 0
        said = await ask(client, [show(list(SIZES)[number % 3], "Colour?")])
    return len(said) / 10


async def shows_to_the_blind(task):
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        await ask(client, [show("red", "Colour?")])
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision") / "model", "qwen2_5_vl")


@pytest.fixture
def job(cli: Cli, model: Path) -> list[str]:
    """Two steps of four rows."""
    write_rows(
        cli.cwd / "rows.jsonl", [{"prompt": "-", "colour": c} for c in ["red", "green", "blue"] * 4]
    )
    (cli.cwd / "agents.py").write_text(AGENTS)
    return [
        *("train", "--threads", "1", "--device", "cpu", "--model", str(model), "--name", "run"),
        *("--data.train-files", "rows.jsonl", "--rollout.agent.run", "agents.py:shows_two"),
        *("--data.train-batch-size", "4", "--rollout.n", "4", "--data.max-response-length", "192"),
        *("--data.max-prompt-length", "64", "--actor.optim.lr", "1e-3", "--data.val-size", "2"),
        *("--trainer.total-training-steps", "2", "--algorithm.filter-groups", "False"),
        *("--trainer.save-freq", "1", "--trainer.test-freq", "1"),
    ]


def test_an_agent_shows_pictures_in_later_turns(cli: Cli, job: list[str], model: Path) -> None:
    cli.ok(*job, "--algorithm.old-log-probs", "trainer")
    run = cli.cwd / "runs" / "run"
    rows = step_rows(run)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["reward/turns/mean"] == 3
        assert row["actor/grad_norm"] > 0
        # Engine and trainer see the same pictures at the same places.
        assert row["training/rollout_log_probs_diff_max"] < 1e-4
    before, after = Reference.load(model), Reference.load(run / "export")
    tower = [n for n, _ in before.model.named_parameters() if n.startswith("model.visual.")]
    moved = [not before.model.get_parameter(n).equal(after.model.get_parameter(n)) for n in tower]
    assert any(moved)
    for row in read_rows(run / "samples.jsonl"):
        assert row["prompt"].count("<|image_pad|>") == 1
        shown = [piece for piece in row["pieces"] if not piece["is_sampled"]]
        assert all("<|image_pad|>" in piece["text"] for piece in shown)
        # The third picture follows the first answer, and not the second picture.
        assert [piece["parent"] for piece in row["pieces"]] == [-1, 0, 1, 0, 3]


def test_sessions_of_a_group_may_show_other_pictures(cli: Cli, job: list[str]) -> None:
    cli.ok(*option_set(job, "--rollout.agent.run", "agents.py:differs"))
    for row in step_rows(cli.cwd / "runs" / "run"):
        assert row["training/rollout_log_probs_diff_max"] < 1e-4


@pytest.mark.slow
def test_vllm_sees_pictures_of_later_turns(vllm_cli: Cli, job: list[str]) -> None:
    assert vllm_cli(*job, "--rollout.engine", "vllm").code == 0
    rows = step_rows(vllm_cli.cwd / "runs" / "run")
    assert len(rows) == 2
    assert all(row["training/rollout_log_probs_diff_max"] < 1e-4 for row in rows)


def test_a_model_without_vision_answers_with_400(cli: Cli, job: list[str], chatty: Path) -> None:
    job = option_set(job, "--rollout.agent.run", "agents.py:shows_to_the_blind")
    error = cli.refused(*option_set(job, "--model", str(chatty)))
    assert "messages[0].content[0].type is 'image_url'; expected text" in error
