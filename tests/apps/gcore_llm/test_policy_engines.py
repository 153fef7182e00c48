"""`gcore-llm train` whose policy generates in processes of its own, on a server, or by speculation."""

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from command_line import (
    Cli,
    assert_same_metrics,
    metrics_of,
    option_set,
    read_rows,
    step_rows,
    val_rows,
)
from process_tree import left_after
from server_processes import free_port, served_by_vllm
from waiting import wait_until

SERVED = (
    "--rollout.engine",
    "vllm_server",
    "--rollout.urls",
    "http://h:1",
    "--rollout.engine-options.weights_dir",
    "x",
)
ON_RAY = (*SERVED, "--runtime", "ray")
# What happens at the n-th call of the reward, which is in the middle of generation; the run knows by nothing else.
REWARD = """
import os
import signal
from pathlib import Path

from process_tree import grandchildren

calls = 0


def reward(prompt, completion, row):
    global calls
    calls += 1
    # Not at every call: the engines would be done before this process had looked at what they made.
    if calls % 20 == 0:
        engines = grandchildren(os.getpid())
        with Path("engines").open("a") as file:
            print(*engines, file=file)
        if calls in {calls} and not Path("done").exists():
            {action}
    return sum(ord(c) % 2 == 0 for c in completion) / max(len(completion), 1)
"""


def args_of(
    cli: Cli, own_args: list[str], action: str, *, calls: list[int], num_processes: int = 2
) -> list[str]:
    """A run in engine processes, whose reward does something at these calls."""
    (cli.cwd / "acting.py").write_text(
        REWARD.replace("{calls}", repr(calls)).replace("{action}", action)
    )
    return [
        *option_set(own_args, "--reward", "acting.py:reward"),
        "--rollout.num-processes",
        str(num_processes),
    ]


OWN_ENGINE = """
import json
from pathlib import Path

from gcore_rollout import HFEngine


def make(model, *, dtype, **options):
    with Path("made.jsonl").open("a") as file:
        print(json.dumps(options), file=file)
    del options["mine"]
    return HFEngine.from_pretrained(model, dtype=dtype, **options)
"""


def engines_of(cli: Cli) -> set[int]:
    """Every engine process that the runs have had."""
    return {
        int(pid) for line in (cli.cwd / "engines").read_text().splitlines() for pid in line.split()
    }


@pytest.mark.slow
def test_engine_processes_that_are_killed(cli: Cli, own_args: list[str]) -> None:
    """Before the first weights came and after: the run has every sample once, and is the same as with none killed."""
    # So long that the second one's replacement is there before the end.
    base = option_set(own_args, "--trainer.total-training-steps", "4")
    cli.ok(*base, "--name", "undisturbed")
    args = args_of(
        cli, base, "os.kill(engines[0], signal.SIGKILL)", calls=[20, 60], num_processes=3
    )
    out = cli.ok(*args, "--name", "killed")
    expected, found = metrics_of(cli.cwd / "runs/undisturbed"), metrics_of(cli.cwd / "runs/killed")
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-6)
    seen = [line.split() for line in (cli.cwd / "engines").read_text().splitlines()]
    killed = {seen[0][0], seen[2][0]}
    assert len(killed) == 2
    # Each was announced, once, by the name that its row in the timeline has.
    said = [re.fullmatch(r"(engine \d) is gone: (.*)", line) for line in out.splitlines()]
    assert {match[2] for match in said if match} == {
        f"engine process {pid} was killed by SIGKILL; a replacement is being started"
        for pid in killed
    }
    assert sum(match is not None for match in said) == 2
    assert not killed & set(seen[-1])
    stages: dict[str, set[str]] = {}
    for row in read_rows(cli.cwd / "runs/killed/spans.jsonl"):
        for name, spans in row["devices"].items():
            stages.setdefault(name, set()).update(stage for stage, *_ in spans)
    assert stages == {f"engine {i}": {"gen", "sync"} for i in range(3)} | {
        "trainer 0": {"prepare", "train", "sync"}
    }
    logs = cli.cwd / "runs/killed/logs"
    assert {path.name for path in logs.glob("*.log")} == {
        "main.log",
        *(f"engine-{i}.log" for i in range(3)),
    }
    assert sum(path.read_text().count(" begins\n") for path in logs.glob("engine-*.log")) == 5
    engines = engines_of(cli)
    assert len(engines) == 5
    assert not left_after(engines, 60.0)


@pytest.mark.slow
def test_resumption_with_engine_processes(cli: Cli, own_args: list[str]) -> None:
    """A run of partial rollouts that is killed takes its engines with it, and continues its unfinished samples."""
    base = option_set(
        option_set(own_args, "--data.max-response-length", "192"),
        "--trainer.total-training-steps",
        "3",
    )
    base += [
        "--rollout.partial-rollout",
        "True",
        "--rollout.over-sample-rate",
        "1",
        "--trainer.save-freq",
        "1",
    ]
    args = args_of(
        cli, base, 'Path("done").touch(); os.kill(os.getpid(), signal.SIGKILL)', calls=[80]
    )
    assert cli(*args).code == -9
    num_steps = len(step_rows(cli.cwd / "runs/default"))
    assert num_steps in (1, 2)
    assert not left_after(engines_of(cli), 60.0)
    assert f"resuming after step {num_steps} of 3" in cli.ok(*args)
    rows = step_rows(cli.cwd / "runs/default")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["sampling/groups"] == 8 for row in rows)
    assert any(row["sampling/unfinished_groups"] > 0 for row in rows)
    # A step that has enough of what the one before sampled too much samples nothing.
    lengths = [row["response_length/max"] for row in rows if "response_length/max" in row]
    assert lengths
    assert max(lengths) <= 192
    assert rows[0]["training/rollout_probs_diff_mean"] < 1e-5
    assert len(engines_of(cli)) == 4
    assert not left_after(engines_of(cli), 60.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "code"),
    [("raise ValueError('enough')", 2), ("os.kill(os.getpid(), signal.SIGINT)", 130)],
)
def test_no_engine_process_outlives_a_run(
    cli: Cli, own_args: list[str], action: str, code: int
) -> None:
    assert cli(*args_of(cli, own_args, action, calls=[60])).code == code
    engines = engines_of(cli)
    assert len(engines) == 2
    assert not left_after(engines, 60.0)


@pytest.mark.slow
def test_a_custom_engine(cli: Cli, own_args: list[str]) -> None:
    """Made by a function in a file, here and in processes of its own."""
    (cli.cwd / "engine.py").write_text(OWN_ENGINE)
    cli.ok(*own_args, "--name", "hf")
    for name, options in {"here": [], "apart": ["--rollout.num-processes", "2"]}.items():
        options += ["--rollout.engine-options", "mine=2"]
        cli.ok(*own_args, "--rollout.engine", "engine.py:make", *options, "--name", name)
        assert_same_metrics(cli.cwd / "runs" / name, cli.cwd / "runs/hf")
    made = [json.loads(line) for line in (cli.cwd / "made.jsonl").read_text().splitlines()]
    assert len(made) == 3
    assert all(
        options == {"max_num_seqs": 256, "eos_token_ids": [1], "device": "cpu", "mine": 2}
        for options in made
    )


@pytest.mark.slow
def test_speculation_in_a_process(vllm_cli: Cli, own_args: list[str]) -> None:
    """vLLM, with guesses from the text itself: greedy responses stay, and log-probs are the trainer's."""
    args = option_set(own_args, "--data.max-response-length", "32")
    vllm_cli.ok(*args, "--name", "plain", "--trainer.total-training-steps", "1")
    options = ["--rollout.engine", "vllm", "--rollout.num-processes", "1"]
    guesses = '{"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}'
    options += [
        "--rollout.engine-options",
        guesses,
        "--rollout.engine-options.speculative_config.prompt_lookup_max",
        "4",
    ]
    # vLLM says one thing and another as it starts.
    options += [
        "--rollout.engine-options",
        "gpu_memory_utilization=0.3",
        "seed_per_sample=true",
        "async_scheduling=false",
        "block_size=32",
        "max_num_batched_tokens=512",
    ]
    assert vllm_cli(*args, *options, "--name", "guessed").code == 0
    rows = step_rows(vllm_cli.cwd / "runs/guessed")
    assert [row["sampling/oldest_version"] for row in rows] == [0, 1]
    assert all(row["training/rollout_probs_diff_mean"] < 1e-5 for row in rows)
    plain, guessed = (
        read_rows(vllm_cli.cwd / f"runs/{name}/samples/before.jsonl")
        for name in ("plain", "guessed")
    )
    assert [row["completion"] for row in guessed] == [row["completion"] for row in plain]


@pytest.mark.slow
def test_responses_in_fp8_are_corrected(vllm_cli: Cli, own_args: list[str]) -> None:
    """Weights, keys and values of the engine, in each step; log-probs differ from the trainer's, and are weighted."""
    options = ["--dtype", "bfloat16", "--rollout.engine", "vllm", "--rollout.engine-options"]
    options += ["quantization=fp8_per_channel", "kv_cache_dtype=fp8"]
    options += ["--algorithm.old-log-probs", "trainer"]
    options += ["--algorithm.rollout-correction.rollout-is", "token"]
    # vLLM says one thing and another as it starts.
    assert vllm_cli(*own_args, *options).code == 0
    run = vllm_cli.cwd / "runs/default"
    for row in step_rows(run):
        assert 1e-5 < row["training/rollout_probs_diff_mean"] < 0.1
        assert row["rollout_corr/rollout_is_max"] > 1.0001
        assert row["actor/grad_norm"] > 0
    assert "tensors cannot be compared with the trainer's" in (run / "logs/main.log").read_text()


@pytest.fixture(scope="module")
def url(vllm_forks: None, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    del vllm_forks
    with vllm_server(tiny, tmp_path_factory.mktemp("vllm")) as address:
        yield address


def vllm_server(model: Path, folder: Path) -> AbstractContextManager[str]:
    """Start a server of a model, and yield its URL."""
    options = ["--max-num-seqs", "64", "--worker-extension-cls", "gcore_rollout.TiedHeadWorker"]
    return served_by_vllm(model, *options, log=folder / "log")


@pytest.fixture
def server_args(cli: Cli, own_args: list[str], url: str) -> list[str]:
    (cli.cwd / "weights").mkdir()
    return [
        *own_args,
        "--rollout.engine",
        "vllm_server",
        "--rollout.urls",
        url,
        "--rollout.engine-options.weights_dir",
        "weights",
    ]


@pytest.mark.slow
def test_a_server(cli: Cli, own_args: list[str], server_args: list[str], url: str) -> None:
    cli.ok(*own_args, "--name", "here")
    (expected, *_) = val_rows(cli.cwd / "runs/here")
    # The second run finds the last weights of the first one on the server.
    for name in ("first", "second"):
        cli.ok(*server_args, "--name", name)
        rows = step_rows(cli.cwd / f"runs/{name}")
        assert [row["sampling/oldest_version"] for row in rows] == [0, 1]
        assert all(row["training/rollout_probs_diff_mean"] < 1e-5 for row in rows)
        assert all(row["actor/grad_norm"] > 0 for row in rows)
        assert (
            val_rows(cli.cwd / f"runs/{name}")[0]["val/greedy/score/mean"]
            == expected["val/greedy/score/mean"]
        )
    assert list((cli.cwd / "weights").iterdir()) == []
    # Looking at a run leaves its servers alone: without them it works, too.
    config = cli.cwd / "runs/second/config.toml"
    config.write_text(config.read_text().replace(url, "http://127.0.0.1:1"))
    assert "step 2: held-out score" in cli.ok("eval", "runs/second")


@pytest.mark.slow
def test_servers_on_ray(cli: Cli, server_args: list[str], tiny: Path, url: str) -> None:
    """Each controller has a server of its own, and what they make is what they make for a run in one process."""
    with vllm_server(tiny, cli.cwd) as other:
        args = [each for arg in server_args for each in ([url, other] if arg == url else [arg])]
        args += ["--controllers", "2"]
        cli.ok(*args, "--name", "here")
        cli.ok(*args, "--name", "ray", "--runtime", "ray", "--trainer.num-processes", "2")
        assert_same_metrics(cli.cwd / "runs/ray", cli.cwd / "runs/here")
        engines = {
            name for row in read_rows(cli.cwd / "runs/ray/spans.jsonl") for name in row["devices"]
        }
        assert {"engine 0", "engine 1"} <= engines
        assert list((cli.cwd / "weights").iterdir()) == []
        args = option_set(args, "--trainer.total-training-steps", "50")
        command = cli.start(*args, "--name", "lost", "--runtime", "ray")
        command.wait_for_steps(cli.cwd / "runs/lost", 1)
    # The run needs them both: it ends, and can be resumed on others, here in one process.
    finished = command.wait()
    assert finished.code == 2
    assert f"the server at {other} was lost" in finished.err
    num_steps = len(step_rows(cli.cwd / "runs/lost"))
    args = option_set(
        option_set(args, "--controllers", "1"), "--trainer.total-training-steps", str(num_steps + 1)
    )
    cli.ok(*(arg for arg in args if arg != other), "--name", "lost")
    assert len(step_rows(cli.cwd / "runs/lost")) == num_steps + 1


@pytest.mark.slow
def test_a_judge_on_a_server(cli: Cli, own_args: list[str], tiny: Path, url: str) -> None:
    judge = ["--reward-model.kind", "judge", "--reward-model.path", str(tiny)]
    for name, value in {
        "engine": "vllm_server",
        "urls": url,
        "pattern": r"(\d)",
    }.items():
        judge += [f"--reward-model.judge.{name}", value]
    judge += ["--reward-model.judge.score-range", "0", "9"]
    cli.ok(
        *own_args,
        *judge,
        "--reward-model.judge.unparsable-score",
        "0",
        "--reward-model.judge.max-response-length",
        "8",
    )
    assert all(
        0 < row["reward/model/parsed/mean"] < 1 for row in step_rows(cli.cwd / "runs/default")
    )


@pytest.mark.slow
def test_a_server_that_does_not_fit(cli: Cli, server_args: list[str], tiny: Path, url: str) -> None:
    other = cli.cwd / "other"
    shutil.copytree(tiny, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    wrong = {
        f"runs {tiny}; expected": option_set(server_args, "--model", str(other)),
        "takes 512 tokens; expected at least data.max_prompt_length": option_set(
            server_args, "--data.max-response-length", "500"
        ),
        "no vllm_server answers at": option_set(
            server_args, "--rollout.urls", f"http://127.0.0.1:{free_port()}"
        ),
        "rollout.engine_options.weights_dir is 'nowhere'; expected an existing folder": option_set(
            server_args, "--rollout.engine-options.weights_dir", "nowhere"
        ),
    }
    for expected, args in wrong.items():
        assert expected in " ".join(cli.refused(*args).split())
    assert not (cli.cwd / "runs").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--rollout.num-processes", "-1"], "rollout.num_processes is -1; expected 0 or more"),
        (
            ["--rollout.urls", "http://h:1"],
            "rollout.engine is 'hf' and rollout.urls is ['http://h:1']",
        ),
        (
            ["--rollout.engine", "vllm_server"],
            "rollout.engine is 'vllm_server' and rollout.urls is []",
        ),
        (
            ["--rollout.engine", "vllm_server", "--rollout.urls", "h:1"],
            "rollout.urls has 'h:1'; expected http://HOST:PORT",
        ),
        (
            ["--rollout.engine", "vllm_server", "--rollout.urls", "http://h:1", "http://h:1"],
            "expected each server once",
        ),
        (
            ["--rollout.engine", "sglang_server", "--rollout.urls", "http://h:1"],
            "rollout.engine_options.weights_dir is not set; expected a folder with rollout.engine 'sglang_server'",
        ),
        (
            ["--rollout.engine-options.weights_dir", "x"],
            "rollout.engine_options has 'weights_dir'; expected some of decode_mode, kv_cache_bytes with engine 'hf'",
        ),
        (["--rollout.weights-dir", "x"], "did you mean --rollout.engine-options.weights-dir?"),
        (
            [
                "--rollout.engine",
                "vllm_server",
                "--rollout.urls",
                "http://h:1",
                "--rollout.num-processes",
                "2",
            ],
            "rollout.num_processes is 2 and rollout.engine is 'vllm_server'; expected 0",
        ),
        (
            [*ON_RAY, "--controllers", "2"],
            "controllers is 2; expected at most one for each of the 1 rollout.urls",
        ),
        (
            [*ON_RAY, "--rollout.colocated", "true"],
            "rollout.colocated is true; expected auto or false with rollout.en",
        ),
        (
            [*ON_RAY, "--ray.weight-sync", "delta"],
            "ray.weight_sync is 'delta'; expected 'full' with rollout.engine",
        ),
        (
            [
                *ON_RAY,
                "--placement.strategy",
                "dynamic",
                "--reward-model.kind",
                "judge",
                "--reward-model.path",
                "x",
            ],
            "placement.strategy is 'dynamic'; expected 'split' with a policy on servers; others need engines",
        ),
        (
            ["--rollout.engine-options", "quantization=fp8"],
            "rollout.engine_options has 'quantization'; expected some of decode_mode, kv_cache_bytes with engine 'hf'",
        ),
        (
            ["--rollout.engine", "vllm", "--rollout.engine-options", "quantization=fp8"],
            "rollout.engine_options.quantization is 'fp8'; expected none without algorithm.rollout_correction, such as",
        ),
        (
            ["--rollout.engine", "vllm", "--rollout.engine-options", "kv_cache_dtype=fp8"],
            "rollout.engine_options.kv_cache_dtype is 'fp8'; expected none without algorithm.rollout_correction",
        ),
        (
            ["--rollout.engine", "vllm", "--rollout.engine-options", "quantisation=fp8"],
            "rollout.engine_options has 'quantisation'; expected options that the engine has, such as quantization",
        ),
        (
            ["--rollout.engine", "vllm", "--rollout.engine-options", '{"seed": 1}'],
            "rollout.engine_options has 'seed'; expected none of convert, data_parallel_size,",
        ),
        (
            ["--rollout.engine", "engine.py:make", "--rollout.engine-options", "device=cpu"],
            "rollout.engine_options has 'device'; expected none of device, dtype,",
        ),
        (
            ["--rollout.engine-options", "{seed"],
            "--rollout.engine-options is '{seed'; expected JSON",
        ),
        (
            ["--rollout.engine-options.gpu_memory_utilization", "0.5"],
            "rollout.engine_options has 'gpu_memory_utilization'; expected some of decode_mode, kv_cache_bytes with",
        ),
        (
            ["--rollout.engine", "vllm", "--rollout.engine-options", "gpu_memory_utilization=1.5"],
            "rollout.engine_options.gpu_memory_utilization is 1.5; expected a number in (0, 1]",
        ),
        (
            ["--rollout.engine", "vllm", "--rollout.engine-options", "max_num_batched_tokens=0"],
            "rollout.engine_options.max_num_batched_tokens is 0; expected an integer, 1 or more",
        ),
        (
            ["--reward-model.judge.urls", "http://h:1"],
            "reward_model.judge.engine is 'hf' and reward_model.judge.urls is ['http://h:1']",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_settings(cli: Cli, own_args: list[str], options: list[str], expected: str) -> None:
    assert expected in " ".join(cli.refused(*own_args, *options).split())
    assert list(cli.cwd.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--rollout.engine", "sglang"],
            "rollout.engine_options.server_python is not set; expected the Python of an environment with",
        ),
        (
            ["--rollout.engine-options.server_python", "x"],
            "rollout.engine_options has 'server_python'; expected some of decode_mode, kv_cache_bytes with",
        ),
        (
            ["--rollout.engine", "sglang", "--rollout.engine-options", "port=1"],
            "rollout.engine_options has 'port'; expected none of base_gpu_id,",
        ),
        (
            ["--rollout.engine", "sglang", "--rollout.engine-options.server_python", "/no/python"],
            "rollout.engine_options.server_python is '/no/python'; expected the Python of an environment with SGLang",
        ),
    ],
)
def test_a_server_that_cannot_be_started_is_refused(
    cli: Cli, own_args: list[str], options: list[str], message: str
) -> None:
    assert message in cli.refused(*own_args, *options)
    assert not (cli.cwd / "runs").exists()


SGLANG = os.environ.get("GCORE_SGLANG_PYTHON", "")


@pytest.mark.sglang
@pytest.mark.skipif(
    not SGLANG, reason="needs an environment with SGLang: scripts/sglang-cpu/setup FOLDER"
)
@pytest.mark.parametrize("runtime", ["inline", "ray"])
def test_sglang_that_the_run_starts(cli: Cli, own_args: list[str], runtime: str) -> None:
    """One of two servers gets kill -9 between steps: another takes its place, and all of them end with the run."""
    args = [
        *option_set(own_args, "--trainer.total-training-steps", "4"),
        "--name",
        "own",
        "--runtime",
        runtime,
    ]
    args += ["--rollout.engine", "sglang", "--rollout.engine-options"]
    args += [f"server_python={SGLANG}", "gpu_memory_utilization=0.2", "max_total_tokens=20000"]
    if runtime == "inline":
        # The servers sleep while the trainer works.
        args += ["--rollout.colocated", "true"]
    command = cli.start(*args, "--rollout.num-processes", "2")
    command.wait_for_steps(cli.cwd / "runs/own", 1)
    os.kill(servers()[0], signal.SIGKILL)
    finished = command.wait()
    assert finished.code == 0, finished.err
    found = step_rows(cli.cwd / "runs/own")
    assert [row["sampling/oldest_version"] for row in found] == [0, 1, 2, 3]
    assert all(row["training/rollout_probs_diff_mean"] < 1e-5 for row in found)
    wait_until(lambda: not servers())


def servers() -> list[int]:
    found = [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"sglang.launch_server" in read_bytes(path)
    ]
    return sorted(
        int(path.parent.name) for path in found if read_bytes(path).startswith(SGLANG.encode())
    )


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
