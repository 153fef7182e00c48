"""`gcore-llm train` with agents, which get a URL and a key."""

import json
import signal
from collections import Counter
from pathlib import Path
from statistics import mean

import pytest
from command_line import Cli, option_set, read_rows, step_rows

AGENTS = '''
import asyncio
import os
import signal

import openai
from gcore_agents import SessionReward


def connect(task, agent=""):
    return openai.AsyncOpenAI(
        base_url=task.base_url,
        api_key=task.api_key,
        max_retries=0,
        default_headers={"x-gcore-agent": agent},
    )


async def ask(client, messages, **options):
    reply = await client.chat.completions.create(model="any", messages=messages, max_tokens=12, **options)
    return reply.choices[0].message


async def branching(task):
    """A conversation that goes two ways, a helper with a question of its own, and a turn that is sampled again."""
    async with connect(task) as client:
        question = [{"role": "user", "content": f"{task.row['answer']}: "}]
        first = await ask(client, question)
        start = [*question, first.model_dump(exclude_none=True)]
        one, other = await asyncio.gather(
            ask(client, [*start, {"role": "user", "content": " and? "}]),
            ask(client, [*start, {"role": "user", "content": " or? "}]),
        )
        await ask(client, [{"role": "user", "content": "? help "}])
        await ask(client, [{"role": "user", "content": "? help "}])
    text = (one.content or "") + (other.content or "")
    return {"digits": float(sum(c.isdigit() for c in text)), "length": len(text) / 100}


def in_a_thread(task):
    with openai.OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        question = [{"role": "user", "content": f"{task.row['answer']}: "}]
        for _ in range(2):
            reply = client.chat.completions.create(model="any", messages=question, max_tokens=12)
            question += [
                {"role": "assistant", "content": reply.choices[0].message.content},
                {"role": "user", "content": " more: "},
            ]
            length = float(len(reply.choices[0].message.content))
            task.session.add_reward(SessionReward(value=length, response_id=reply.id))


async def planner_and_helper(task):
    """Two agents of one session: a planner that asks a helper between its two turns. One gains what the other loses."""
    async with connect(task, "planner") as planner, connect(task, "helper") as helper:
        question = [{"role": "user", "content": f"{task.row['answer']}: "}]
        plan = await ask(planner, question)
        advice = await ask(helper, [{"role": "user", "content": f"? help {plan.content}"}])
        end = {"role": "user", "content": f" or {advice.content}? "}
        last = await ask(planner, [*question, plan.model_dump(exclude_none=True), end])
    gain = len(last.content or "") / 10
    return [SessionReward(value=gain, agent="planner"), SessionReward(value=-gain, agent="helper")]


async def forgets_the_helper(task):
    return [reward for reward in await planner_and_helper(task) if reward.agent != "helper"]


async def rewards_a_stranger(task):
    return [*await planner_and_helper(task), SessionReward(value=1.0, agent="judge")]


async def unscored(task):
    async with connect(task) as client:
        await ask(client, [{"role": "user", "content": "?"}])


async def silent(task):
    return 1.0


async def repeats(task):
    """Answers every turn alike, and rewards every session alike."""
    async with connect(task) as client:
        messages = [{"role": "user", "content": f"{task.row['answer']}: "}]
        for _ in range(3):
            reply = await ask(client, messages)
            messages += [reply.model_dump(exclude_none=True), {"role": "user", "content": " or? "}]
    return 1.0


async def refused(task):
    async with connect(task) as client:
        try:
            await ask(client, [])
        except openai.BadRequestError:
            return 1.0


async def dies(task):
    await unscored(task)
    raise OSError("the shop is closed")


async def sleeps(task):
    await asyncio.sleep(60)


async def killed_once(task):
    """Ends the whole run at its thirtieth session."""
    with open("started.txt", "a") as file:
        file.write(".")
    if len(open("started.txt").read()) == 30:
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.to_thread(in_a_thread, task)


def count_turns(session):
    return [float(turn.number) for turn in session.graph.turns()]
'''


@pytest.fixture
def agent_args(cli: Cli, own_args: list[str], chatty: Path) -> list[str]:
    (cli.cwd / "agents.py").write_text(AGENTS)
    args = option_set(option_set(own_args, "--model", str(chatty)), "--reward", "")
    return option_set(args, "--data.max-response-length", "128")


def use(args: list[str], agent: str, *options: str) -> list[str]:
    return [*args, "--rollout.agent.run", f"agents.py:{agent}", *options]


def test_conversations_that_branch_are_one_sample(cli: Cli, agent_args: list[str]) -> None:
    cli.ok(*use(agent_args, "branching"))
    for row in step_rows(cli.cwd / "runs/default"):
        # Of the two helpers' turns for the same question, the last one counts.
        assert row["reward/turns/mean"] == pytest.approx(4)
        assert row["critic/score/mean"] == pytest.approx(
            row["reward/digits/mean"] + row["reward/length/mean"]
        )
        assert row["actor/grad_norm"] > 0
        assert row["training/rollout_probs_diff_mean"] < 1e-5
        assert row["training/rollout_log_probs_diff_max"] < 1e-4
    check_pieces(cli.cwd / "runs/default")


def check_pieces(run: Path) -> None:
    """A sample has its conversations as the model saw them, and the page shows where they branch."""
    for row in read_rows(run / "samples.jsonl"):
        pieces = row["pieces"]
        assert "".join(piece["text"] for piece in pieces) == row["response"]
        sampled = [piece for piece in pieces if piece["is_sampled"]]
        assert len(sampled) == 4
        assert {piece["version"] for piece in sampled} == {row["weight_version"]}
        # The first turn, its two continuations, and the helper's question, which follows nothing.
        assert [piece["parent"] for piece in pieces] == [-1, 0, 1, 0, 3, -2, 5]
        assert [piece["is_sampled"] for piece in pieces] == [True, False] * 3 + [True]
    page = (run / "report.html").read_text()
    assert "branch after piece 1" in page
    assert "a conversation of its own" in page


def test_a_policy_learns_to_predict_its_environment(cli: Cli, agent_args: list[str]) -> None:
    """All scores are equal: there is nothing else to learn."""
    args = option_set(agent_args, "--trainer.total-training-steps", "4")
    args = option_set(args, "--actor.optim.lr", "1e-2")
    options = ["--algorithm.filter-groups", "False", "--algorithm.options.echo-coef", "1"]
    cli.ok(*use(args, "repeats", *options))
    rows = step_rows(cli.cwd / "runs/default")
    losses = [row["actor/echo_loss"] for row in rows]
    assert losses[-1] < 0.7 * losses[0]
    assert all(row["actor/pg_loss"] == 0 and row["training/has_signal"] == 1 for row in rows)


@pytest.mark.parametrize("credit", ["turns", "agents.py:count_turns"])
def test_turns_are_credited_one_by_one(cli: Cli, agent_args: list[str], credit: str) -> None:
    cli.ok(*use(agent_args, "in_a_thread", "--rollout.agent.credit", credit))
    for row in step_rows(cli.cwd / "runs/default"):
        assert row["reward/turns/mean"] == pytest.approx(2)
        assert row["actor/grad_norm"] > 0
        if credit != "turns":
            # The turns of each session are nodes 1 and 3.
            assert row["reward/agent/return/mean"] == pytest.approx(2)
            assert row["critic/advantages/min"] == -1
            assert row["critic/advantages/max"] == 1


def test_turns_at_the_same_state_are_compared(cli: Cli, agent_args: list[str]) -> None:
    """GiGPO without deviations: of each session's two turns the first follow one message, and the second another."""
    options = ["--algorithm.adv-estimator", "gigpo", "--rollout.agent.credit", "turns"]
    options += ["--algorithm.options.norm-adv-by-std-in-grpo", "False"]
    args = option_set(agent_args, "--data.max-response-length", "256")
    cli.ok(*use(args, "in_a_thread", *options, "--trainer.log-samples", "32"))
    groups: dict[int, list[tuple[float, list[dict[str, float]]]]] = {}
    for row in read_rows(cli.cwd / "runs/default/samples.jsonl"):
        sampled = [piece for piece in row["pieces"] if piece["is_sampled"]]
        assert len(sampled) == 2
        if not row["is_filtered"]:
            groups.setdefault(row["prompt_index"], []).append((row["score"], sampled))
    assert groups
    for sessions in groups.values():
        assert len(sessions) == 4
        mean_score = sum(score for score, _ in sessions) / 4
        for turn in (0, 1):
            mean_return = sum(turns[turn]["credit"] for _, turns in sessions) / 4
            for score, turns in sessions:
                expected = score - mean_score + turns[turn]["credit"] - mean_return
                assert turns[turn]["advantage"] == pytest.approx(expected, abs=1e-5)


def test_each_agent_of_a_session_has_advantages_of_its_own(cli: Cli, agent_args: list[str]) -> None:
    """They are as computed from the journal: an agent's reward less the mean of this agent's in the group.

    Rewards of each session add up to 0, so that advantages of the session's score would be 0, too.
    """
    options = ["--rollout.agent.credit", "branches", "--trainer.log-samples", "32"]
    # No session is cut off, whose tokens would not be trained on.
    args = option_set(agent_args, "--data.max-response-length", "256")
    cli.ok(*use(args, "planner_and_helper", *options))
    run = cli.cwd / "runs/default"
    groups = read_rewards(run / "sessions")
    num_pieces: Counter[str] = Counter()
    for row in read_rows(run / "samples.jsonl"):
        if row["prompt_index"] not in groups:
            continue
        group = groups[row["prompt_index"]]
        for piece in row["pieces"]:
            assert piece["is_sampled"] == ("agent" in piece)
            if not piece["is_sampled"]:
                continue
            agent = piece["agent"]
            own = group[row["index"]][agent]
            mean = sum(rewards[agent] for rewards in group.values()) / len(group)
            assert piece["credit"] == pytest.approx(own)
            if row["is_filtered"]:
                assert own == pytest.approx(mean)
                continue
            assert piece["advantage"] == pytest.approx(own - mean, abs=1e-6)
            num_pieces[agent] += 1
    assert num_pieces["planner"] == 2 * num_pieces["helper"] > 0
    for row in step_rows(run):
        assert row["critic/score/max"] == row["critic/score/min"] == 0
        assert row["reward/agent/planner/return/mean"] > 0
        assert row["reward/agent/helper/return/mean"] == pytest.approx(
            -row["reward/agent/planner/return/mean"]
        )
        assert row["critic/advantages/max"] > 0 > row["critic/advantages/min"]
        assert row["actor/grad_norm"] > 0
    assert "agent helper" in (run / "report.html").read_text()


def test_roles_have_moving_baselines(cli: Cli, agent_args: list[str]) -> None:
    """RAE: computed from the journal, over two steps, with the run's state saved and loaded between them."""
    options = ["--algorithm.adv-estimator", "rae", "--rollout.agent.credit", "branches"]
    options += ["--algorithm.options.ema-decay", "0.8", "--algorithm.filter-groups", "False"]
    options += ["--trainer.log-samples", "64", "--rollout.n", "1"]
    options += ["--trainer.save-freq", "1"]
    args = use(option_set(agent_args, "--data.max-response-length", "256"), "planner_and_helper")
    cli.ok(*option_set(args, "--trainer.total-training-steps", "1"), *options)
    cli.ok(*args, *options)
    run = cli.cwd / "runs/default"
    rows = {(row["prompt_index"], row["index"]): row for row in read_rows(run / "samples.jsonl")}
    assert len({row["step"] for row in rows.values()}) == 2
    assert not any(row["is_filtered"] for row in rows.values())
    baselines = {"planner": 0.0, "helper": 0.0}
    for place in sorted(rows, key=lambda place: (rows[place]["step"], *place)):
        returns: dict[str, float] = {}
        for piece in rows[place]["pieces"]:
            if "agent" in piece:
                agent = piece["agent"]
                returns[agent] = piece["credit"]
                expected = piece["credit"] - baselines[agent]
                assert piece["advantage"] == pytest.approx(expected, abs=1e-5)
        for agent, value in returns.items():
            baselines[agent] = 0.8 * baselines[agent] + 0.2 * value
    assert baselines["planner"] == pytest.approx(-baselines["helper"], abs=1e-5) != 0.0


def read_rewards(journal: Path) -> dict[int, dict[int, dict[str, float]]]:
    """Return the rewards of a journal's training sessions: by prompt, number of the session and agent.

    Prompts that evaluations have, too, are left out: their sessions have the same names.
    """
    rewards: dict[int, dict[int, dict[str, float]]] = {}
    names: Counter[str] = Counter()
    for file in journal.glob("*.jsonl"):
        for record in read_rows(file):
            name = record["key"].split()[0]
            names[name] += 1
            prompt, _, number = name.partition("/")
            by_agent = {reward["agent"]: reward["value"] for reward in record["rewards"]}
            rewards.setdefault(int(prompt), {})[int(number)] = by_agent
            turns = [node["agent"] for node in record["nodes"] if "agent" in node]
            assert turns == ["planner", "helper", "planner"]
    evaluated = {int(name.partition("/")[0]) for name, count in names.items() if count > 1}
    return {prompt: group for prompt, group in rewards.items() if prompt not in evaluated}


@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        ("forgets_the_helper", "agent 'helper' of episode"),
        ("rewards_a_stranger", "agent is 'judge'; expected one of: helper, planner"),
    ],
)
def test_agents_without_a_reward_and_rewards_without_an_agent(
    cli: Cli, agent_args: list[str], agent: str, expected: str
) -> None:
    finished = cli(*use(agent_args, agent, "--rollout.agent.credit", "branches"))
    assert finished.code == 2
    assert expected in " ".join(finished.err.split())


def test_a_command_finds_its_model_in_its_environment(cli: Cli, agent_args: list[str]) -> None:
    script = cli.cwd / "agent.py"
    script.write_text(
        "import json, openai, os, pathlib, urllib.request\n"
        "row = json.loads(pathlib.Path(os.environ['GCORE_ROW']).read_text())\n"
        "question = {'role': 'user', 'content': str(row['answer']) + ': '}\n"
        "reply = openai.OpenAI().chat.completions.create(model='x', messages=[question], max_tokens=8)\n"
        "reward = {'value': float(len(reply.choices[0].message.content))}\n"
        "url = os.environ['OPENAI_BASE_URL'].removesuffix('/v1') + '/session/reward'\n"
        "headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "urllib.request.urlopen(urllib.request.Request(url, json.dumps(reward).encode(), headers))\n"
    )
    args = option_set(agent_args, "--trainer.total-training-steps", "1")
    args = option_set(option_set(args, "--rollout.n", "2"), "--data.train-batch-size", "1")
    cli.ok(*args, "--data.val-size", "0", "--rollout.agent.run", f"command: python {script}")
    [row] = step_rows(cli.cwd / "runs/default")
    assert row["critic/score/mean"] > 0


@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        ("unscored", "returned no reward, and the run has none"),
        ("silent", "has no turn: the agent made no call"),
        (
            "refused",
            "has no turn: its last call was refused: messages is a list; expected one or more messages",
        ),
        ("dies", "dies: OSError: the shop is closed"),
        ("sleeps", "sleeps took longer than 4 s"),
    ],
)
def test_an_agent_that_fails(cli: Cli, agent_args: list[str], agent: str, expected: str) -> None:
    """It ends the run, or its group is dropped; it is never worth 0."""
    args = use(agent_args, agent, "--rollout.agent.timeout-s", "2" if agent == "sleeps" else "60")
    finished = cli(*args)
    assert finished.code == 2
    assert expected in " ".join(finished.err.split())
    if agent == "unscored":
        args = [*option_set(args, "--trainer.total-training-steps", "1"), "--data.val-size", "0"]
        finished = cli(*args, "--reward-calls.max-failed-share", "1", "--name", "dropped")
        assert finished.code == 3
        [row] = step_rows(cli.cwd / "runs/dropped")
        assert row["sampling/dropped_groups"] > 0


def test_a_run_that_is_killed_loses_no_finished_session(cli: Cli, agent_args: list[str]) -> None:
    """It takes them from its journal, and has the numbers of a run that was not killed.

    But for rounding: an engine's log-probs depend in their last bits on the turns that it happens to compute together.
    """
    args = [*use(agent_args, "killed_once"), "--name", "killed"]
    started = cli.cwd / "started.txt"
    started.write_text("." * 100)
    cli.ok(*args, "--name", "whole")
    num_whole = len(started.read_text()) - 100
    started.unlink()
    assert cli(*args).code == -signal.SIGKILL
    folder = cli.cwd / "runs/killed/sessions"
    num_finished = 0
    for file in folder.glob("*.jsonl"):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        assert len({record["key"] for record in records}) == len(records)
        num_finished += sum(len(record["rewards"]) == 2 for record in records)
    # Those that were at work when it was killed are not finished.
    assert 0 < num_finished < 30
    cli.ok(*args)
    assert len(started.read_text()) == num_whole + 30 - num_finished
    names = ("critic/score/mean", "response_length/mean", "actor/grad_norm", "reward/turns/mean")
    rows = step_rows(cli.cwd / "runs/killed")
    expected = step_rows(cli.cwd / "runs/whole")
    for row, whole in zip(rows, expected, strict=True):
        for name in names:
            assert row[name] == pytest.approx(whole[name], rel=1e-5), name


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--rollout.agent.run", "nothing"], "expected PATH.py:function, or 'command: ...'"),
        (["--rollout.agent.run", "none.py:f"], "rollout.agent.run is 'none.py:f': no such file"),
        (
            ["--rollout.agent.credit", "none"],
            "expected session, turns, branches, or PATH.py:function",
        ),
        (
            ["--rollout.agent.credit", "turns", "--reward", "math-verify"],
            "expected session with reward: turns are credited with the agent's rewards alone",
        ),
        (
            ["--rollout.agent.credit", "branches", "--reward", "math-verify"],
            "expected session with reward: turns are credited with the agent's rewards alone",
        ),
        (
            ["--rollout.agent.run", "a.py:f", "--rollout.multi-turn.environment", "b.py:g"],
            "expected '' with rollout.multi_turn.environment",
        ),
        (
            ["--algorithm.adv-estimator", "gigpo"],
            "algorithm.adv_estimator is 'gigpo'; expected another one without an agent whose rollout.agent.credit is",
        ),
        (
            ["--algorithm.adv-estimator", "rae"],
            "algorithm.adv_estimator is 'rae'; expected another one without an agent whose rollout.agent.credit is",
        ),
        (
            [
                "--rollout.agent.run",
                "a.py:f",
                "--rollout.agent.credit",
                "a.py:g",
                "--algorithm.adv-estimator",
                "rae",
            ],
            "algorithm.filter_groups is true; expected false with algorithm.adv_estimator 'rae', from which every",
        ),
        (
            ["--rollout.agent.run", "a.py:f", "--algorithm.adv-estimator", "gae"],
            "expected one without a critic, with an agent",
        ),
    ],
)
def test_bad_settings(cli: Cli, own_args: list[str], options: list[str], expected: str) -> None:
    assert expected in " ".join(cli.refused(*own_args, *options).split())


@pytest.mark.slow
def test_the_example_learns(cli: Cli, tmp_path: Path) -> None:
    """The command of the README: a tiny model from nothing, an agent of the OpenAI Agents SDK, a tool."""
    example = Path(__file__).parents[3] / "examples/tool_agent.py"
    cli.ok(
        *("train", "--rollout.agent.run", f"{example}:agent"),
        *("--trainer.total-training-steps", "16"),
    )
    rows = step_rows(cli.cwd / "runs/default")
    assert all(row["training/rollout_log_probs_diff_max"] < 1e-3 for row in rows)
    rewards = [row["critic/rewards/mean"] for row in rows]
    # Of 64 sessions or more a step. The order in which they end changes the last bits, and with them the run.
    assert mean(rewards[-4:]) - mean(rewards[:4]) >= 0.1
