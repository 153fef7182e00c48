"""Wrong input: one message that says what is wrong, exit code 2, and nothing on disk that was not there before."""

import asyncio
import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from command_line import Cli, option_set, step_rows, write_rows
from safetensors.torch import load_file, save_file
from tiny_jobs import EVENS

from gcore_llm import train
from gcore_llm.cli import parse_train
from gcore_runs import RunResult, UserError, check_model


def write(cli: Cli, name: str, text: str) -> str:
    (cli.cwd / name).write_text(text)
    return name


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--trainer.save-frq", "3"], "--trainer.save-freq"),
        (["--rolout.n", "3"], "--rollout.n"),
        (["--rollout.n", "many"], "many"),
        (
            ["--rollout.n", "1"],
            "rollout.n is 1; expected at least 2 for algorithm.adv_estimator 'grpo'",
        ),
        (
            ["--rollout.engine", "tgi"],
            "rollout.engine is 'tgi'; expected hf, vllm, sglang, vllm_server, sglang_server or",
        ),
        (
            ["--rollout.engine", "none.py:make"],
            "rollout.engine is 'none.py:make': no such file none.py",
        ),
        (["--rollout.temperature", "0"], "rollout.temperature is 0.0; expected above 0"),
        (["--data.train-batch-size", "0"], "data.train_batch_size is 0; expected 1 or more"),
        (["--trainer.test-freq", "0"], "trainer.test_freq is 0"),
        (
            ["--actor.ppo-max-token-len", "47"],
            "at least data.max_prompt_length + data.max_response_length = ",
        ),
        (
            ["--rollout.agent.run", "a.py:f", "--actor.ppo-max-token-len", "79"],
            "at least data.max_prompt_length + 2 * data.max_response_length = 80",
        ),
        (["--warmup.test-freq", "0"], "warmup.test_freq is 0"),
        (["--task.num-val", "0"], "task.num_val is 0"),
        (["--actor.optim.lr", "-1"], "lr is -1.0; expected a finite number above 0"),
        (["--actor.loss.clip-ratio-c", "0.5"], "clip_ratio_c is 0.5"),
        (["--name", "a/b"], "name is 'a/b'; expected a plain folder name"),
        (["--task.name", "chain_sum"], "expected one source of prompts"),
        (["--recipe", "chatgpt"], "chatgpt"),
        (["--config", "nowhere.toml"], "config is nowhere.toml: No such file"),
        (
            ["--trainer.num-processes", "2", "--trainer.parallel.context-parallel-size", "4"],
            "context_parallel_size=4 is 4; expected a divisor of the world of 2 ranks: 4 ranks would fit",
        ),
        (
            ["--trainer.parallel.tensor-model-parallel-size", "2"],
            "is 2; expected 1 for the torch backend",
        ),
        (
            ["--trainer.parallel.ulysses-sequence-parallel-size", "2"],
            "ulysses_sequence_parallel_size is 2",
        ),
        (
            ["--trainer.megatron.overlap-grad-reduce", "True"],
            "trainer.megatron is {'overlap_grad_reduce': True}; expected {} with trainer.backend 'torch'",
        ),
        (
            [
                *("--trainer.backend", "megatron", "--actor.lora-rank", "4"),
                *(
                    "--trainer.megatron.overlap-grad-reduce",
                    "True",
                    "--trainer.megatron.overlap-param-gather",
                    "True",
                ),
            ],
            "trainer.megatron.overlap_param_gather is true; expected auto or false with actor.lora_rank",
        ),
        (
            [
                "--trainer.backend",
                "megatron",
                "--device",
                "cpu",
                "--trainer.megatron.transformer-engine",
                "True",
            ],
            "trainer.megatron.transformer_engine is true; expected auto or false with device cpu",
        ),
        (
            ["--algorithm.kl-ctrl.kl-coef", "0.1"],
            "it is read with algorithm.adv_estimator gae, reinforce_plus_plus",
        ),
        (
            ["--algorithm.adv-estimator", "gae", "--algorithm.options.lam", "1.5"],
            "algorithm.options.lam is 1.5; expected a number in [0, 1]",
        ),
        (
            ["--algorithm.options.tau-pos", "2"],
            "algorithm.options.tau_pos is 2; expected norm_adv_by_std_in_grpo, echo_coef with algorithm.adv_estimator "
            "'grpo' and actor.loss.loss_mode 'vanilla'",
        ),
        (
            ["--algorithm.options.echo-coef", "0.05"],
            "algorithm.options.echo_coef is 0.05; expected 0 without rollout.agent or rollout.multi_turn",
        ),
        (
            ["--algorithm.options.echo-coef", "0.05", "--rollout.agent.run", "a.py:f"],
            "algorithm.filter_groups is true; expected false with algorithm.options.echo_coef, from which every group",
        ),
        (
            ["--actor.loss.loss-mode", "sapo", "--algorithm.options.tau-pos", "many"],
            "algorithm.options.tau_pos is 'many'; expected a valid number",
        ),
        (
            ["--actor.loss.loss-mode", "dro"],
            "algorithm.options.dro_beta is 0.0; expected a finite number above 0",
        ),
        (
            ["--algorithm.adv-estimator", "gdpo"],
            "algorithm.options.gdpo_rewards is None; expected a table of finite weights, by the names of the reward's",
        ),
        (
            ["--algorithm.adv-estimator", "optimal_token_baseline"],
            "algorithm.old_log_probs is 'rollout'; expected 'trainer' with algorithm.adv_estimator "
            "'optimal_token_baseline', which needs probabilities of all tokens",
        ),
        (["--algorithm.lam", "0.9"], "did you mean --algorithm.options.lam?"),
        (
            ["--algorithm.rollout-correction.rollout-is", "token"],
            "algorithm.rollout_correction.rollout_is is 'token'; expected None with algorithm.old_log_probs 'rollout'",
        ),
        (
            ["--actor.router-replay", "R2"],
            "algorithm.old_log_probs is 'rollout'; expected 'trainer' with actor.router_replay",
        ),
        (
            [
                *("--actor.router-replay", "R3", "--rollout.engine", "sglang"),
                *("--rollout.engine-options.server_python", sys.executable),
            ],
            "actor.router_replay is 'R3'; expected 'disabled' or 'R2' with rollout.engine 'sglang', which returns none",
        ),
        (["--algorithm.overlong.buffer-len", "9"], "expected at most data.max_response_length=8"),
        (["--actor.optim.min-lr-ratio", "2"], "min_lr_ratio is 2.0; expected a number in [0, 1]"),
        (
            ["--placement.strategy", "dynamic"],
            "placement.strategy is 'dynamic'; expected 'split' with runtime 'inline'; others need runtime 'ray'",
        ),
        (["--device", "cuda:99"], "device is 'cuda:99'; expected one of this machine's "),
        (["--device", "gpu"], "device is 'gpu'; expected cpu, cuda, cuda:NUMBER or auto"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_options(cli: Cli, own_args: list[str], options: list[str], expected: str) -> None:
    assert expected in " ".join(cli.refused(*own_args, *options).split())
    assert list(cli.cwd.iterdir()) == []


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        (
            "[trainer]\nsave_frq = 3",
            "s.toml: unknown field trainer.save_frq; did you mean trainer.save_freq?",
        ),
        ("quux = 3", "s.toml: unknown field quux; known here: actor.*, algorithm.*"),
        ("[rollout]\nn = 'many'", "s.toml: rollout.n is 'many'"),
        ("[data]\ntrain_files = 'a.jsonl'", "s.toml: data.train_files is 'a.jsonl'"),
        ("data = 3", "s.toml: data is 3"),
        (
            "[rollout]\nn = 1",
            "rollout.n is 1; expected at least 2 for algorithm.adv_estimator 'grpo'",
        ),
        ("[actor.optim]\nlr = 0", "lr is 0.0; expected a finite number above 0"),
        ("[trainer]\nschedule = 'now'", "s.toml: trainer.schedule is 'now'"),
        ("[rollout\nn = 3", "config is s.toml: not TOML"),
    ],
)
def test_toml(cli: Cli, own_args: list[str], toml: str, expected: str) -> None:
    write(cli, "s.toml", toml)
    assert expected in cli.refused(*own_args, "--config", "s.toml")
    assert [p.name for p in cli.cwd.iterdir()] == ["s.toml"]


def test_config_that_is_not_text(cli: Cli, own_args: list[str]) -> None:
    (cli.cwd / "s.toml").write_bytes(b"\xff\xfe")
    assert "config is s.toml: not TOML" in cli.refused(*own_args, "--config", "s.toml")


def no_tokenizer(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()


def broken_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")


def no_eos(model: Path) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))


def no_config(model: Path) -> None:
    (model / "config.json").unlink()


def broken_config(model: Path) -> None:
    (model / "config.json").write_text("{")


def unknown_architecture(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "quux"}')


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def with_config(**values: object) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | values))

    return damage


def change_weight(model: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weights = load_file(model / "model.safetensors")
    weights[name] = change(weights[name])
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def nan_weight(model: Path) -> None:
    change_weight(model, "model.layers.0.mlp.gate_proj.weight", lambda weight: weight * math.nan)


def eight_bit_weight(model: Path) -> None:
    change_weight(
        model, "model.layers.0.mlp.gate_proj.weight", lambda weight: weight.to(torch.int8)
    )


def float8_weight(model: Path) -> None:
    change_weight(
        model, "model.layers.0.mlp.gate_proj.weight", lambda weight: weight.to(torch.float8_e4m3fn)
    )


def with_adapters(model: Path) -> None:
    (model / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}'
    )


DEEP = "[" * 100_000 + "]" * 100_000


def deep_config(model: Path) -> None:
    (model / "config.json").write_text(DEEP)


def deep_generation_config(model: Path) -> None:
    (model / "generation_config.json").write_text(DEEP)


def generation_config_is_a_list(model: Path) -> None:
    (model / "generation_config.json").write_text("[]")


def deep_index(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(DEEP)


def index_is_a_list(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            eight_bit_weight,
            "model is 'model', whose model.layers.0.mlp.gate_proj.weight is quantized (I8); expected weights in ",
        ),
        (float8_weight, "is quantized (F8_E4M3); expected weights in float32, bfloat16 or float16"),
        (
            with_config(quantization_config={"quant_method": "gptq", "bits": 4}),
            "model is 'model', whose config.json has quantization_config; expected weights in float32",
        ),
        (
            with_adapters,
            "holds a model (config.json) and adapters (adapter_config.json); expected only a model",
        ),
        (
            deep_config,
            "model folder model has a config.json that does not load: maximum recursion depth",
        ),
        (
            with_config(hidden_size="many"),
            "does not load: Validation error for field 'hidden_size'",
        ),
        (
            deep_generation_config,
            "model/generation_config.json is not JSON: maximum recursion depth",
        ),
        (
            generation_config_is_a_list,
            "model/generation_config.json is list; expected a JSON object",
        ),
        (
            index_is_a_list,
            "model/model.safetensors.index.json is no index of weights: TypeError: list indices",
        ),
        (
            deep_index,
            "model/model.safetensors.index.json is no index of weights: RecursionError: maximum recursion",
        ),
    ],
)
def test_checked_models(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny, "model")
    check_model(Path("model"))
    damage(Path("model"))
    with pytest.raises(UserError, match=re.escape(expected)):
        check_model(Path("model"))


def test_engines_other_than_hf_may_have_quantized_weights(tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    float8_weight(model)
    with_config(quantization_config={"quant_method": "fp8"})(model)
    check_model(model, may_be_quantized=True)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (shutil.rmtree, "model is 'model'; expected a Hugging Face folder with config.json"),
        (no_config, "model is 'model'; expected a Hugging Face folder with config.json"),
        (broken_config, "model folder model has a config.json that does not load"),
        (unknown_architecture, "model folder model has a config.json that does not load"),
        (no_weights, "model folder model has no weights"),
        (no_tokenizer, "model folder model has no tokenizer"),
        (broken_tokenizer, "model folder model has a tokenizer that does not load"),
        (no_eos, "model folder model: its tokenizer has no eos_token"),
    ],
)
def test_model(
    cli: Cli, own_args: list[str], tiny: Path, damage: Callable[[Path], None], expected: str
) -> None:
    shutil.copytree(tiny, cli.cwd / "model")
    damage(cli.cwd / "model")
    assert expected in cli.refused(*option_set(own_args, "--model", "model"))
    assert not (cli.cwd / "runs").exists()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            with_config(hidden_size=96),
            "the weights in model do not fit its config.json: model.embed_tokens.weight has shape [128, 128]; "
            "expected [128, 96]",
        ),
        (
            with_config(num_attention_heads=0),
            "the model in model does not load (ZeroDivisionError: ",
        ),
        (
            nan_weight,
            "model.layers.0.mlp.gate_proj.weight of 'qwen3' holds nan or infinity; expected finite weights",
        ),
    ],
)
def test_weights(
    cli: Cli, own_args: list[str], tiny: Path, damage: Callable[[Path], None], expected: str
) -> None:
    shutil.copytree(tiny, cli.cwd / "model")
    damage(cli.cwd / "model")
    assert expected in cli.refused(*option_set(own_args, "--model", "model"))
    assert not (cli.cwd / "runs/default").exists()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def reward(p, c, r): return None", "returned None; expected one number"),
        ("def reward(p, c, r): return float('nan')", "returned nan; expected a finite number"),
        ("def reward(p, c, r): return 'good'", "returned 'good'; expected one number"),
        ("def reward(p, c, r): return r['gold']", "KeyError: 'gold'"),
        (
            "def reward(p, c): return 1.0",
            "reward is reward(p, c); expected the parameters (prompt, completion, row), ",
        ),
        ("async def reward(p, c, r): raise OSError('no judge')", "OSError: no judge"),
        ("import quux", "does not import: ModuleNotFoundError: No module named 'quux'"),
        ("def reward(p, c, r) return 1", "does not import: SyntaxError"),
        ("def score(p, c, r): return 1.0", "has no function 'reward', it has ['score']"),
    ],
)
def test_reward(cli: Cli, own_args: list[str], source: str, expected: str) -> None:
    write(cli, "mine.py", source)
    assert expected in cli.refused(*option_set(own_args, "--reward", "mine.py:reward"))
    assert not (cli.cwd / "runs").exists()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("nowhere.py:reward", "no such file nowhere.py"),
        ("nowhere.py", "expected PATH.py:function"),
        ("accuracy", "expected PATH.py:function"),
        (
            "",
            "reward is not set: PATH.py:function, math-verify, gsm8k, aime, multiple-choice, code is needed",
        ),
    ],
)
def test_reward_spec(cli: Cli, own_args: list[str], spec: str, expected: str) -> None:
    assert expected in cli.refused(*option_set(own_args, "--reward", spec))
    assert not (cli.cwd / "runs").exists()


def test_a_reward_that_starts_to_fail_leaves_the_last_finished_step(
    cli: Cli, own_args: list[str]
) -> None:
    good = Path(own_args[own_args.index("--reward") + 1].removesuffix(":reward")).read_text()
    failing = f"{good}\ncalls = 0\n\ndef failing(p, c, r):\n    global calls\n    calls += 1\n"
    failing += "    assert calls < 90, 'the judge is gone'\n    return reward(p, c, r)\n"
    write(cli, "mine.py", failing)
    args = [
        *option_set(own_args, "--reward", "mine.py:failing"),
        "--trainer.total-training-steps",
        "4",
    ]
    error = cli.refused(*args)
    assert "reward 'failing' on prompt " in error
    assert "AssertionError: the judge is gone" in error
    assert [row["step"] for row in step_rows(cli.cwd / "runs/default")] == [1, 2]
    write(cli, "mine.py", f"{good}\nfailing = reward\n")
    assert "resuming after step 2 of 4" in cli.ok(*args)


def test_brackets_deeper_than_can_be_read(cli: Cli, own_args: list[str]) -> None:
    write(cli, "deep.toml", f"name = {DEEP}")
    assert "config is deep.toml: not TOML: more brackets" in cli.refused(
        *own_args, "--config", "deep.toml"
    )
    with pytest.raises(UserError, match="expected fewer brackets in each other"):
        parse_train([*own_args[1:], "--task.params.terms", DEEP])


def test_training_while_an_event_loop_runs(own_args: list[str], tmp_path: Path) -> None:
    """As in a notebook: it fails at once, with what works there, which `to_thread` is."""
    config = parse_train([*own_args[1:], "--runs-dir", str(tmp_path)])

    async def notebook() -> RunResult:
        with pytest.raises(UserError, match=r"result = await asyncio\.to_thread\(train, config\)"):
            train(config)
        return await asyncio.to_thread(train, config)

    assert asyncio.run(notebook()).run == tmp_path / "default"


def bad_data(
    cli: Cli, own_args: list[str], text: str, *options: str, name: str = "bad.jsonl"
) -> str:
    write(cli, name, text)
    error = cli.refused(*option_set(own_args, "--data.train-files", name), *options)
    assert not (cli.cwd / "runs").exists()
    return error


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "bad.jsonl:2 is not JSON"),
        ('{"prompt": "a"}\n["b"]\n', "bad.jsonl:2 is list; expected a JSON object"),
        (
            '{"prompt": "a"}\n{"question": "b"}\n',
            "bad.jsonl: row 2 has no column 'prompt' (data.prompt_key); it has 'question'",
        ),
        ('{"prompt": ""}\n', "bad.jsonl: prompt of row 1 is empty"),
        ('{"prompt": 7}\n', "bad.jsonl: prompt of row 1 is 7"),
        ('{"prompt": []}\n', "bad.jsonl: prompt of row 1 is []"),
        (
            '{"prompt": [{"role": "user"}]}\n',
            "prompt of row 1: message 1.content is missing; expected text",
        ),
        (
            '{"prompt": [{"role": "user", "content": "a"}]}\n',
            "the model's tokenizer has no chat template",
        ),
        ("\n", "bad.jsonl has no rows"),
    ],
)
def test_rows(cli: Cli, own_args: list[str], text: str, expected: str) -> None:
    assert expected in bad_data(cli, own_args, text)


def test_data_files(cli: Cli, own_args: list[str]) -> None:
    assert (
        "data.max_prompt_length is 3: all 2 prompts are longer, the shortest has 4 tokens"
        in bad_data(
            cli,
            own_args,
            '{"prompt": "aaaa"}\n{"prompt": "aaaaa"}\n',
            "--data.max-prompt-length",
            "3",
        )
    )
    assert "bad.csv is not CSV: Empty CSV file" in bad_data(cli, own_args, "", name="bad.csv")
    assert "data.train_files holds an empty name; expected a .jsonl, " in cli.refused(
        *option_set(own_args, "--data.train-files", "")
    )
    assert "bad.txt ends in '.txt'; expected " in bad_data(cli, own_args, "", name="bad.txt")
    assert "bad.parquet is not Parquet" in bad_data(cli, own_args, "prompt", name="bad.parquet")
    (cli.cwd / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    assert "latin.jsonl is not UTF-8" in cli.refused(
        *option_set(own_args, "--data.train-files", "latin.jsonl")
    )
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"]}), cli.cwd / "columns.parquet")
    assert (
        "columns.parquet: row 1 has no column 'prompt' (data.prompt_key); it has 'question'"
        in cli.refused(*option_set(own_args, "--data.train-files", "columns.parquet"))
    )
    assert "data file nowhere.jsonl does not exist" in cli.refused(
        *option_set(own_args, "--data.train-files", "nowhere.jsonl")
    )
    no_files = own_args[: own_args.index("--data.train-files")]
    assert "data.train_files is not set" in cli.refused(*no_files, "--reward", "math-verify")


def test_a_prompt_too_long_for_the_model(cli: Cli, own_args: list[str]) -> None:
    """The tiny model takes 512 tokens."""
    write(cli, "long.jsonl", json.dumps({"prompt": "1" * 510}) + "\n")
    args = [
        *option_set(own_args, "--data.train-files", "long.jsonl"),
        "--data.max-prompt-length",
        "600",
    ]
    assert "the model takes at most 512" in cli.refused(*args)
    # Nothing has been trained yet, so the name is free for other settings.
    assert "all 1 prompts are longer" in cli.refused(*args, "--data.max-prompt-length", "20")
    write(cli, "long.jsonl", json.dumps({"prompt": "1" * 500}) + "\n")
    cli.ok(*args, "--seed", "1")


def test_prompts_without_a_model(cli: Cli, own_args: list[str]) -> None:
    i = own_args.index("--model")
    without = [*own_args[:i], *own_args[i + 2 :]]
    assert "model is not set" in cli.refused(*without, "--recipe", "own_data")
    assert "expected one source of prompts" in cli.refused(*without)
    assert list(cli.cwd.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--task.name", "quux"], "task.name is 'quux'"),
        (["--task.name", "leg_counting"], "or a model of your own for any task: --model FOLDER"),
        (
            ["--task.params.min-term", "2"],
            "task.params.min_term is not a setting of 'chain_sum'; expected such as min_terms",
        ),
        (
            ["--task.params.min-terms", "5"],
            "task.name is 'chain_sum' with task.params {'min_terms': 5",
        ),
        (
            ["--data.max-prompt-length", "1"],
            "data.max_prompt_length is 1: the problems of chain_sum are longer",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_task(cli: Cli, options: list[str], expected: str) -> None:
    """The name stays free: the same command with the mistake fixed makes the run."""
    assert expected in cli.refused("train", "--threads", "1", *options)
    assert list(cli.cwd.iterdir()) == []


def test_unknown_task_with_a_model(cli: Cli, tiny: Path) -> None:
    assert "task.name is 'quux'" in cli.refused("train", "--model", tiny, "--task.name", "quux")
    assert list(cli.cwd.iterdir()) == []


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_changed_settings_on_resume(cli: Cli, own_args: list[str]) -> None:
    cli.ok(*own_args)
    before = snapshot(cli.cwd)
    error = cli.refused(*own_args, "--actor.optim.lr", "1e-4", "--seed", "3")
    assert (
        "runs/default was started with other settings (actor.optim.lr: 0.001 -> 0.0001; seed: 0 -> 3)"
        in error
    )
    assert "--resume never, or another --name" in error
    assert snapshot(cli.cwd) == before
    longer = cli.ok(*own_args, "--trainer.total-training-steps", "3", "--trainer.save-freq", "2")
    assert "resuming after step 2 of 3" in longer


def test_changed_files_on_resume(cli: Cli, own_args: list[str], tiny: Path) -> None:
    """Rows of the same number and size, another reward under the same name, and other weights of the same shapes."""
    write(cli, "mine.py", EVENS)
    shutil.copytree(tiny, cli.cwd / "model")
    rows = write_rows(
        cli.cwd / "rows.jsonl", ({"prompt": f"{i}+1=", "answer": i + 1} for i in range(10, 50))
    )
    args = option_set(option_set(own_args, "--reward", "mine.py:reward"), "--model", "model")
    args = option_set(args, "--data.train-files", "rows.jsonl")
    cli.ok(*args)
    longer = [*args, "--trainer.total-training-steps", "3"]
    weights = cli.cwd / "model/model.safetensors"
    for setting, file, old, new in (
        ("data.train_files", rows, b"10+1=", b"99+1="),
        ("model", weights, weights.read_bytes()[-64:], bytes(64)),
    ):
        before = file.read_bytes()
        assert before.count(old) >= 1
        file.write_bytes(before.replace(old, new))
        error = cli.refused(*longer)
        assert (
            f"runs/default was started with other settings ({setting}: the content of its files has changed)"
            in error
        )
        assert "without runs/default/fingerprints.json contents are not compared" in error
        file.write_bytes(before)
    # Code that was corrected is no reason to start again.
    reward = cli.cwd / "mine.py"
    reward.write_text(reward.read_text().replace("% 2 == 0", "% 3 == 0"))
    output = cli.ok(*longer)
    assert (
        "reward: the content of its files has changed since the run was started; it continues with the new"
        in output
    )
    assert "resuming after step 2 of 3" in output


def test_run_folder_in_use(cli: Cli, own_args: list[str]) -> None:
    sleepy = "import time\n\ndef reward(p, c, r):\n    time.sleep(0.01 if c else 0)\n    return float(len(c) % 2)\n"
    write(cli, "mine.py", sleepy)
    args = option_set(own_args, "--reward", "mine.py:reward")
    first = cli.start(*args)
    while not (cli.cwd / "runs/default/config.toml").exists():
        time.sleep(0.01)
    assert (
        "runs/default is in use by another process: choose another --name, or wait"
        in cli.refused(*args)
    )
    finished = first.wait()
    assert (finished.code, finished.err) == (0, "")


@pytest.mark.parametrize("command", [["sample", "nowhere", "3+4="], ["report", "nowhere"]])
def test_a_folder_that_is_not_a_run(cli: Cli, command: list[str]) -> None:
    expected = "nowhere is not a run's folder: it has no config.toml; the command train makes one under runs/"
    assert expected in cli.refused(*command)
    (cli.cwd / "nowhere").mkdir()
    assert expected in cli.refused(*command)
    assert list((cli.cwd / "nowhere").iterdir()) == []


def test_commands(cli: Cli) -> None:
    known = (
        "expected one of train, sft, reward-model, dpo, sample, eval, simulate, from-verl, from-trl, compare-with, "
        "report, trace, logs, doctor"
    )
    assert f"unknown command 'trian'; {known}" in cli.refused("trian")
    usage = cli.ok("--help")
    assert usage.startswith("usage: gcore-llm COMMAND")
    bare = cli()
    assert (bare.code, bare.out, bare.err) == (2, usage, "")
    assert "--rollout.temperature" in cli.ok("train", "--help")


def test_wrong_arguments_of_sample_and_eval(cli: Cli, own_args: list[str]) -> None:
    cli.ok(*own_args)
    for options, expected in (
        (["--n", "0"], "n is 0; expected 1 or more"),
        (["--n", "x"], "n is 'x'; expected a valid integer"),
        (["--temperature", "nan"], "temperature is nan; expected a finite number"),
        (["--temperature", "-1"], "temperature is -1.0; expected a finite number, 0 or more"),
        (["--max-tokens", "-5"], "max_tokens is -5; expected 0 or more"),
        (["--max-tokens", "5000"], "expected at most 512, which the model takes"),
        (["--seed", "-1"], "seed is -1; expected 0 or more"),
        (["--top-p", "0.9"], "unknown option --top-p; known here: --images, --max-tokens, --n,"),
        (["again"], "unexpected argument 'again'; expected gcore-llm sample RUN PROMPT"),
    ):
        assert expected in cli.refused("sample", "runs/default", "1+1=", *options)
    assert "PROMPT is empty" in cli.refused("sample", "runs/default", "")
    assert "PROMPT is missing; expected gcore-llm sample RUN PROMPT" in cli.refused(
        "sample", "runs/default"
    )
    assert "MODEL is missing; expected gcore-llm eval MODEL" in cli.refused("eval")
    assert "model is 'runs/nosuch'; expected one of the runs in runs: default" in cli.refused(
        "eval", "runs/nosuch"
    )
    assert "model is 'nowhere/a/b'; expected a run's folder" in cli.refused("eval", "nowhere/a/b")
    assert "unknown option --steps; known here: --follow, --lines, --rank, --role" in cli.refused(
        "logs", "x", "--steps"
    )
    Path(cli.cwd / "runs/default/metrics.jsonl").write_text("3\n")
    assert "report.html" in cli.ok("report", "runs/default")


def test_simulate(cli: Cli) -> None:
    (cli.cwd / "model").mkdir()
    (cli.cwd / "model/config.json").write_text("{")
    for options, expected in (
        (
            ["--json", "nowhere/x.json"],
            "json is 'nowhere/x.json'; expected a file in an existing folder",
        ),
        (["--json", "."], ".: Is a directory"),
        (["--model", "nowhere"], "nowhere"),
        (["--model", "model"], "model"),
        (["--max-completion-length", "3"], "did you mean --max-response-length?"),
    ):
        assert expected in cli.refused(
            "simulate", "--devices", "8", "--controllers", "1", "--steps", "1", *options
        )
    assert "calibrate is empty; expected one or more folders of runs" in cli.refused(
        "simulate", "--calibrate"
    )
    assert "nowhere" in cli.refused("simulate", "--calibrate", "nowhere")


def test_a_reward_that_is_not_set_is_found_before_torch_is_imported() -> None:
    code = (
        "import sys; from gcore_llm.cli import main\n"
        "try: main(['train', '--model', 'm', '--data.train-files', 'f'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "gcore-llm: error: reward is not set: PATH.py:function" in result.stderr
    assert result.stdout == "False\n"
