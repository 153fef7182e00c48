"""`gcore-llm train` from end to end: what a run leaves behind, and that it does not depend on how it was run."""

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli, metrics_of, option_set, read_rows, step_rows, val_rows
from trace_events import checked_events, slices_of, threads_of
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from gcore_ckpt import Checkpointer
from gcore_llm.cli import parse_train
from gcore_llm.config import TrainConfig
from gcore_llm.tiny_model import tiny_tokenizer
from gcore_runs.run_folder import RunFolder
from gcore_runs.settings.resources import resolve

EMBEDDED = [
    *("train", "--threads", "1", "--device", "cpu", "--seed", "3"),
    *("--warmup.max-steps", "40", "--warmup.batch-size", "64", "--warmup.test-freq", "20"),
    *("--task.num-train", "500", "--task.num-val", "16", "--task.params.max-terms", "2"),
    *(
        "--data.train-batch-size",
        "8",
        "--data.max-response-length",
        "8",
        "--algorithm.max-num-gen-batches",
        "2",
    ),
    *(
        "--trainer.total-training-steps",
        "4",
        "--trainer.save-freq",
        "3",
        "--trainer.test-freq",
        "2",
    ),
]
VERL_NAMES = {
    *("critic/score/mean", "critic/score/max", "critic/score/min"),
    *(
        "actor/pg_loss",
        "actor/ppo_kl",
        "actor/pg_clipfrac",
        "actor/entropy",
        "actor/grad_norm",
        "actor/lr",
    ),
    *(
        "response_length/mean",
        "response_length/max",
        "response_length/clip_ratio",
        "prompt_length/mean",
    ),
    *(
        "timing_s/gen",
        "timing_s/reward",
        "timing_s/step",
        "perf/throughput",
        "perf/total_num_tokens",
    ),
}


@pytest.fixture(scope="module")
def embedded(shared_cli: Cli) -> Path:
    """The embedded job in small, by the installed command in a process that shares nothing with this one."""
    finished = subprocess.run(
        [Path(sys.executable).with_name("gcore-llm"), *EMBEDDED, "--name", "embedded"],
        cwd=shared_cli.cwd,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "report:  runs/embedded/report.html" in finished.stdout
    return shared_cli.cwd / "runs" / "embedded"


@pytest.fixture(scope="module")
def trained(shared_cli: Cli, own_args: list[str]) -> Path:
    """Two steps on the user's own data."""
    shared_cli.ok(*own_args, "--name", "trained")
    return shared_cli.cwd / "runs" / "trained"


def test_embedded_run_folder(embedded: Path) -> None:
    assert {p.name for p in embedded.iterdir()} == {
        *(
            "config.toml",
            "metrics.jsonl",
            "warmup.jsonl",
            "tensorboard",
            "checkpoints",
            "export",
            "model",
        ),
        *(
            "report.html",
            "samples",
            "samples.jsonl",
            "spans.jsonl",
            "memory.jsonl",
            "placement.json",
            "logs",
            ".lock",
            "fingerprints.json",
        ),
    }
    assert RunFolder(embedded).load_config(TrainConfig) == resolve(
        parse_train([*EMBEDDED[1:], "--name", "embedded"])
    )
    assert [row["step"] for row in read_rows(embedded / "warmup.jsonl")] == [20, 40]
    assert [row["step"] for row in step_rows(embedded)] == [1, 2, 3, 4]
    assert [row["step"] for row in val_rows(embedded)] == [0, 2, 4]
    assert all(
        math.isfinite(value)
        for row in read_rows(embedded / "metrics.jsonl")
        for value in row.values()
    )
    assert Checkpointer(embedded / "checkpoints").steps() == [3, 4]
    for name in ("before", "after"):
        samples = read_rows(embedded / "samples" / f"{name}.jsonl")
        assert len(samples) == 16
        assert all(
            sample.keys() == {"prompt", "completion", "score", "answer"} for sample in samples
        )
    assert "<html" in (embedded / "report.html").read_text()
    check_samples_of_training(embedded)


def check_samples_of_training(run: Path) -> None:
    """Four a step, of all that was sampled, some of which was filtered; the text is what the tokens stand for."""
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    rows = read_rows(run / "samples.jsonl")
    assert [row["step"] for row in rows] == [step for step in (1, 2, 3, 4) for _ in range(4)]
    places = {(row["prompt_index"], row["index"]) for row in rows}
    assert len(places) == len(rows)
    assert {row["is_filtered"] for row in rows} == {True, False}
    for row in rows:
        assert (row["advantage"] is None) == row["is_filtered"]
        assert row["weight_version"] == row["oldest_version"] == row["step"] - 1
        assert len(tokenizer(row["prompt"])["input_ids"]) == row["prompt_tokens"]
        assert row["stop"] == ("stop" if row["response"].endswith("<eos>") else "length")
        assert row["response_tokens"] <= 8
    assert any(row["advantage"] for row in rows)


def test_timeline_for_perfetto_adds_up_to_the_recorded_times(
    embedded: Path, shared_cli: Cli
) -> None:
    assert shared_cli.ok("trace", embedded) == f"{embedded}/trace.json\n"
    events = checked_events(embedded / "trace.json")
    assert list(threads_of(events)) == ["steps", "controller 0", "engine 0", "trainer 0"]
    slices = slices_of(events, "controller 0")
    steps = {
        name: (start, start + length) for name, start, length in slices if name.startswith("step ")
    }
    assert list(steps) == ["step 1", "step 2", "step 3", "step 4"]
    for row in step_rows(embedded):
        start, end = steps[f"step {row['step']:.0f}"]
        # The gaps between stages are part of the step; spans are rounded to tenths of milliseconds.
        assert (end - start) / 1e6 == pytest.approx(row["timing_s/step"], abs=0.25)
        inside = [
            (name, length) for name, at, length in slices if start <= at and at + length <= end
        ]
        stages = {
            name.removeprefix("timing_s/"): value
            for name, value in row.items()
            if name.startswith("timing_s/")
        }
        for stage, seconds in stages.items():
            if stage != "step":
                found = [length for name, length in inside if name == stage]
                # The engine is asked for distributions after it has sampled: if within a millisecond, it is one span.
                joined_s = 1e-3 if stage == "gen" else 0.0
                rounded_s = 2e-4 * (1 + len(found))
                assert sum(found) / 1e6 == pytest.approx(seconds, abs=rounded_s + joined_s)
    between = [start for name, start, _ in slices if name == "checkpoint"]
    # After steps 3 and 4; the last one is after the last span.
    assert len(between) == 1
    assert steps["step 3"][1] <= between[0] < steps["step 4"][0]


def test_embedded_tokenizer_is_what_transformers_loads(embedded: Path) -> None:
    text = "12+3=-5=\n\tA b"
    for folder in ("model", "export"):
        loaded = AutoTokenizer.from_pretrained(embedded / folder)
        assert loaded(text)["input_ids"] == tiny_tokenizer()(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"]) == text
        assert loaded.eos_token_id == 1


def test_metrics_have_the_names_of_the_field(trained: Path) -> None:
    rows = step_rows(trained)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row.keys() >= VERL_NAMES
        assert all(math.isfinite(value) for value in row.values())
        assert row["sampling/groups"] == 8
        assert 0 < row["actor/entropy"] < math.log(128)
        assert row["training/rollout_probs_diff_mean"] < 1e-5
        assert abs(row["actor/ppo_kl"]) < 1e-5
    stages = [
        sum(v for k, v in r.items() if k.startswith("timing_s/") and k != "timing_s/step")
        for r in rows
    ]
    assert all(
        stage <= row["timing_s/step"] * 1.001 for stage, row in zip(stages, rows, strict=True)
    )


def test_tensorboard_holds_the_same_numbers(trained: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained / "tensorboard")).Reload()
    for name in ("critic/score/mean", "actor/pg_loss"):
        expected = [(row["step"], pytest.approx(row[name])) for row in step_rows(trained)]
        assert [(event.step, event.value) for event in events.Scalars(name)] == expected
    assert [event.step for event in events.Scalars("val/greedy/score/mean")] == [0, 2]


def test_export_is_the_last_policy(trained: Path, tiny: Path) -> None:
    exported = AutoModelForCausalLM.from_pretrained(trained / "export")
    saved = Checkpointer(trained / "checkpoints").load()
    assert saved["step"] == 2
    initial = AutoModelForCausalLM.from_pretrained(tiny)
    checkpointed = AutoModelForCausalLM.from_pretrained(tiny)
    checkpointed.load_state_dict(saved["trainer"]["model"], strict=False)
    ids = torch.tensor([AutoTokenizer.from_pretrained(trained / "export")("3+4=")["input_ids"]])
    with torch.no_grad():
        logits = exported(ids).logits
        assert torch.equal(logits, checkpointed(ids).logits)
        assert not torch.equal(logits, initial(ids).logits)


def test_sample_continues_the_prompt(shared_cli: Cli, trained: Path) -> None:
    greedy = shared_cli.ok("sample", trained, "3+4=").removesuffix("\n")
    tokenizer = AutoTokenizer.from_pretrained(trained / "export")
    model: Any = AutoModelForCausalLM.from_pretrained(trained / "export")
    ids = torch.tensor([tokenizer("3+4=")["input_ids"]])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
    )
    assert greedy == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)

    args = ("sample", trained, "3+4=", "--n", "3", "--temperature", "1", "--max-tokens", "4")
    drawn = shared_cli.ok(*args)
    assert drawn == shared_cli.ok(*args)
    assert drawn != shared_cli.ok(*args, "--seed", "1")
    bad = shared_cli("sample", trained, "3+4=", "--n", "0")
    assert (bad.code, bad.err) == (2, "gcore-llm: error: n is 0; expected 1 or more\n")


def test_eval_gives_the_last_held_out_score(shared_cli: Cli, trained: Path) -> None:
    last = val_rows(trained)[-1]
    greedy, sampled = last["val/greedy/score/mean"], last["val/sampled/score/mean"]
    expected = f"step 2: held-out score {greedy:.3f} greedy, {sampled:.3f} sampled\n"
    assert expected in shared_cli.ok("eval", trained)


def test_report_rewrites_the_page(shared_cli: Cli, trained: Path) -> None:
    page = trained / "report.html"
    page.unlink()
    assert shared_cli.ok("report", "runs/trained") == "runs/trained/report.html\n"
    assert "<html" in page.read_text()


def test_the_same_command_after_the_end_trains_nothing(shared_cli: Cli, embedded: Path) -> None:
    kept = ("metrics.jsonl", "warmup.jsonl", "export/model.safetensors", "samples/after.jsonl")
    before = {name: (embedded / name).stat().st_mtime_ns for name in kept}
    out = shared_cli.ok(*EMBEDDED, "--name", "embedded")
    assert "complete: 4 of 4 steps are done" in out
    assert "warm-up" not in out
    assert {name: (embedded / name).stat().st_mtime_ns for name in kept} == before


def test_resume_never_starts_a_second_run(
    shared_cli: Cli, trained: Path, own_args: list[str]
) -> None:
    before = (trained / "metrics.jsonl").read_bytes()
    args = [
        *own_args,
        "--name",
        "trained",
        "--resume",
        "never",
        "--trainer.total-training-steps",
        "1",
    ]
    assert "run folder: runs/trained-2" in shared_cli.ok(*args)
    assert "run folder: runs/trained-3" in shared_cli.ok(*args)
    assert (trained / "metrics.jsonl").read_bytes() == before
    assert [row["step"] for row in step_rows(trained.with_name("trained-3"))] == [1]


SOMETIMES = '''
import json
from pathlib import Path


def reward(prompt, completion, row):
    """Right or wrong by the first character, so that about half of the groups of two carry a signal."""
    value = float(ord(completion[0]) % 2) if completion else 0.0
    with Path("{log}").open("a") as log:
        log.write(json.dumps([prompt, completion, value]) + "\\n")
    return value
'''


@pytest.mark.slow
def test_any_number_of_controllers_gives_the_same_run(cli: Cli, own_args: list[str]) -> None:
    """The same prompts, samples and scores, and losses that differ by the order of additions alone."""
    runs: dict[int, list[dict[str, float]]] = {}
    scored: dict[int, list[list[Any]]] = {}
    for controllers in (1, 2, 4):
        log = cli.cwd / f"scored-{controllers}.jsonl"
        (cli.cwd / "sometimes.py").write_text(SOMETIMES.replace("{log}", log.name))
        args = option_set(own_args, "--reward", "sometimes.py:reward")
        args += [
            "--rollout.n",
            "2",
            "--actor.optim.lr",
            "1e-4",
            "--trainer.total-training-steps",
            "3",
        ]
        args += ["--actor.ppo-mini-batch-size", "3", "--data.train-batch-size", "7"]
        cli.ok(*args, "--name", f"c{controllers}", "--controllers", controllers)
        runs[controllers] = metrics_of(cli.cwd / f"runs/c{controllers}")
        scored[controllers] = sorted(read_rows(log), key=str)
    assert any(row.get("sampling/waves", 0) > 1 for row in runs[1])
    for controllers in (2, 4):
        assert scored[controllers] == scored[1]
        for row, expected in zip(runs[controllers], runs[1], strict=True):
            assert row.keys() == expected.keys()
            for name, value in row.items():
                exact = name.startswith(
                    ("critic/", "val/", "sampling/", "response_length/", "step")
                )
                assert value == pytest.approx(
                    expected[name], rel=1e-12 if exact else 1e-4, abs=1e-4
                ), name


@pytest.mark.slow
def test_router_replay(cli: Cli, own_args: list[str], tmp_path: Path) -> None:
    """The second update of a step sends tokens where the pass for old log-probs did, in both backends alike.

    In float32 that is where the engine sent them, too.
    """
    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3MoeConfig(
        **heads,
        vocab_size=len(tiny_tokenizer()),
        hidden_size=32,
        num_hidden_layers=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    tiny_tokenizer().save_pretrained(tmp_path / "moe")
    args = [
        *option_set(own_args, "--model", str(tmp_path / "moe")),
        "--trainer.total-training-steps",
        "1",
    ]
    args += [
        "--actor.ppo-epochs",
        "3",
        "--actor.optim.lr",
        "0.03",
        "--algorithm.old-log-probs",
        "trainer",
    ]
    megatron = ["--trainer.backend", "megatron", "--trainer.num-processes", "2"]
    variants: dict[str, list[str]] = {
        "free": [],
        "torch": ["--actor.router-replay", "R2"],
        "megatron": [
            "--actor.router-replay",
            "R2",
            *megatron,
            "--trainer.parallel.expert-model-parallel-size",
            "2",
        ],
        "engine": ["--actor.router-replay", "R3"],
        "engine process": ["--actor.router-replay", "R3", "--rollout.num-processes", "1"],
        "engine, megatron": ["--actor.router-replay", "R3", *megatron],
    }
    rows: dict[str, dict[str, float]] = {}
    for name, options in variants.items():
        cli.ok(*args, *options, "--name", name)
        [rows[name]] = step_rows(cli.cwd / "runs" / name)
    names = ("actor/pg_loss", "actor/ppo_kl", "actor/grad_norm")
    for name in names:
        for variant in ("megatron", "engine", "engine process", "engine, megatron"):
            assert rows[variant][name] == pytest.approx(rows["torch"][name], rel=1e-3, abs=1e-5)
    assert any(abs(rows["free"][name] / rows["torch"][name] - 1) > 0.01 for name in names)


def test_router_replay_needs_routers(cli: Cli, own_args: list[str], tiny: Path) -> None:
    for mode in ("R2", "R3"):
        options = ["--actor.router-replay", mode, "--algorithm.old-log-probs", "trainer"]
        message = f"actor.router_replay is {mode!r}; expected 'disabled', because the model in {tiny} has no routers"
        assert message in " ".join(cli.refused(*own_args, *options).split())


@pytest.mark.parametrize(
    "options",
    [
        ["--actor.loss.kl-loss-coef", "0.1", "--actor.loss.entropy-coeff", "0.01"],
        ["--actor.ppo-epochs", "2", "--actor.ppo-mini-batch-size", "4"],
        ["--actor.ppo-epochs", "2", "--algorithm.old-log-probs", "trainer"],
        [
            "--algorithm.filter-groups",
            "False",
            "--algorithm.options.norm_adv_by_std_in_grpo",
            "False",
        ],
        ["--actor.loss.loss-agg-mode", "seq-mean-token-sum", "--actor.loss.clip-ratio-c", "3"],
        ["--actor.loss.loss-agg-mode", "seq-mean-token-mean", "--dtype", "bfloat16"],
        ["--actor.loss.loss-agg-mode", "seq-mean-token-sum-norm", "--data.num-workers", "2"],
        ["--controllers", "4", "--data.train-batch-size", "4", "--actor.ppo-mini-batch-size", "1"],
        [
            "--algorithm.adv-estimator",
            "dr_grpo",
            "--actor.loss.loss-mode",
            "cispo",
            "--actor.ppo-epochs",
            "2",
        ],
        [
            "--algorithm.adv-estimator",
            "rloo",
            "--actor.loss.loss-mode",
            "gspo",
            "--actor.ppo-epochs",
            "2",
        ],
        [
            "--algorithm.adv-estimator",
            "reinforce_plus_plus_baseline",
            "--actor.loss.loss-mode",
            "sapo",
        ],
        ["--algorithm.adv-estimator", "maxrl", "--actor.loss.loss-mode", "dppo_tv"],
        ["--algorithm.adv-estimator", "opo", "--actor.loss.loss-mode", "geo_mean"],
        [
            "--algorithm.adv-estimator",
            "optimal_token_baseline",
            "--algorithm.old-log-probs",
            "trainer",
        ],
        ["--actor.loss.loss-mode", "clip_cov", "--algorithm.options.clip-cov-lb", "0.01"],
        ["--actor.loss.loss-mode", "kl_cov", "--actor.ppo-epochs", "2"],
        ["--actor.loss.loss-mode", "m2po", "--actor.ppo-epochs", "2"],
        ["--actor.loss.loss-mode", "dro", "--algorithm.options.dro-beta", "0.1"],
        [
            "--algorithm.adv-estimator",
            "reinforce_plus_plus",
            "--algorithm.options.gamma",
            "0.9",
            "--controllers",
            "2",
        ],
        ["--actor.loss.kl-loss-coef", "0.1", "--actor.loss.kl-loss-type", "k3+"],
        ["--algorithm.adv-estimator", "remax", "--controllers", "2"],
        [
            "--algorithm.adv-estimator",
            "gae",
            "--algorithm.options.lam",
            "0.9",
            "--actor.ppo-epochs",
            "2",
        ],
        ["--algorithm.adv-estimator", "gae", "--critic.warmup-steps", "1", "--controllers", "2"],
        ["--actor.lora-rank", "4", "--actor.loss.kl-loss-coef", "0.1"],
        [
            "--actor.optim.name",
            "muon",
            "--actor.optim.muon-lr",
            "2e-3",
            "--actor.optim.weight-decay",
            "0.1",
        ],
        ["--algorithm.overlong.buffer-len", "4", "--algorithm.overlong.filter", "True"],
        [
            "--actor.enable-gradient-checkpointing",
            "True",
            "--actor.optim.lr-scheduler-type",
            "cosine",
        ],
    ],
    ids=lambda options: " ".join(options),
)
def test_variants(cli: Cli, own_args: list[str], options: list[str]) -> None:
    cli.ok(*own_args, *options)
    rows = step_rows(cli.cwd / "runs/default")
    assert len(rows) == 2
    assert all(math.isfinite(value) for row in rows for value in row.values())
    warmup = 1 if "--critic.warmup-steps" in options else 0
    assert all(row["actor/grad_norm"] > 0 for row in rows[warmup:])
    assert all("actor/grad_norm" not in row for row in rows[:warmup])
    if "gae" in options:
        assert all(row["critic/vf_loss"] > 0 and row["critic/grad_norm"] > 0 for row in rows)
        assert rows[0]["critic/values/max"] == 0  # a new critic's head is zero
        assert rows[1]["critic/values/max"] != 0
        assert rows[1]["critic/vf_explained_var"] < 1
    if "cosine" in options:
        assert [row["actor/lr"] for row in rows] == pytest.approx(
            [1e-3, 0.5e-3]
        )  # half of a run of two steps
    last = rows[-1]
    if "--actor.loss.kl-loss-coef" in options:
        assert rows[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
        assert last["actor/kl_loss"] > 1e-6
    elif "--actor.ppo-epochs" in options:
        # Of the last update, whose policy is no longer the one that sampled.
        assert abs(last["actor/ppo_kl"]) > 1e-5
        assert last["training/rollout_probs_diff_mean"] > 1e-5


def test_one_response_to_each_prompt(cli: Cli, own_args: list[str]) -> None:
    """FlashREINFORCE, with the options of the page on algorithms."""
    page = Path(__file__).parents[3] / "docs/reference/algorithms.md"
    options = re.search(r"FlashREINFORCE.*?`(.*?)`", page.read_text(), re.DOTALL)
    assert options
    cli.ok(*own_args, *options[1].split())
    for row in step_rows(cli.cwd / "runs/default"):
        assert row["actor/grad_norm"] > 0
        assert row["critic/advantages/min"] < 0 < row["critic/advantages/max"]
        assert 0 <= row["rollout_corr/rollout_rs_seq_mean_kl_max"] < 1e-3


def test_kl_in_the_reward_adapts(cli: Cli, own_args: list[str]) -> None:
    """The divergence is 0 at first, below its target, so the weight falls; then the policy has moved."""
    kl = ["--algorithm.kl-ctrl.kl-coef", "0.5", "--algorithm.kl-ctrl.type", "adaptive"]
    cli.ok(*own_args, *kl, "--algorithm.adv-estimator", "gae", "--algorithm.kl-ctrl.horizon", "100")
    first, second = step_rows(cli.cwd / "runs/default")
    assert first["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)
    assert first["actor/reward_kl_penalty_coeff"] == 0.5
    assert second["actor/reward_kl_penalty_coeff"] == pytest.approx(0.5 * (1 - 0.2 * 32 / 100))
    assert second["actor/reward_kl_penalty"] != first["actor/reward_kl_penalty"]
    assert second["critic/rewards/mean"] != pytest.approx(second["critic/score/mean"], abs=1e-9)


def test_rollout_correction_measures_and_masks(cli: Cli, own_args: list[str]) -> None:
    """Engine and trainer agree here, so weights are 1 and nothing is rejected; a harsh rule rejects what differs."""
    correct = [
        "--algorithm.old-log-probs",
        "trainer",
        "--algorithm.rollout-correction.rollout-is",
        "token",
    ]
    cli.ok(*own_args, *correct, "--actor.ppo-epochs", "2", "--controllers", "2")
    for row in step_rows(cli.cwd / "runs/default"):
        assert row["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4)
        assert row["rollout_corr/rollout_is_max"] == pytest.approx(1, abs=1e-3)
    harsh = ["--algorithm.rollout-correction.rollout-rs", "token_k1", "--name", "harsh"]
    cli.ok(
        *own_args,
        *correct,
        *harsh,
        "--algorithm.rollout-correction.rollout-rs-threshold",
        "1.0000001",
    )
    assert all(
        row["rollout_corr/rollout_rs_masked_fraction"] > 0.1
        for row in step_rows(cli.cwd / "runs/harsh")
    )


def test_a_long_response_costs(cli: Cli, own_args: list[str]) -> None:
    """DAPO's soft punishment: the mean reward falls below the mean score by what the lengths say."""
    cli.ok(*own_args, "--algorithm.overlong.buffer-len", "8", "--algorithm.filter-groups", "False")
    row = step_rows(cli.cwd / "runs/default")[0]
    # The buffer is the whole response here, so every token costs an eighth.
    expected = row["critic/score/mean"] - row["response_length/mean"] / 8
    assert row["critic/rewards/mean"] == pytest.approx(expected, abs=1e-6)


def test_small_micro_batches_change_nothing(cli: Cli, trained: Path, own_args: list[str]) -> None:
    small = [
        "--data.max-prompt-length",
        "12",
        "--actor.ppo-max-token-len",
        "20",
        "--rollout.max-num-seqs",
        "5",
    ]
    cli.ok(*own_args, *small)
    for row, expected in zip(step_rows(cli.cwd / "runs/default"), step_rows(trained), strict=True):
        for name in (
            "critic/score/mean",
            "actor/pg_loss",
            "actor/entropy",
            "actor/grad_norm",
            "response_length/mean",
        ):
            assert row[name] == pytest.approx(expected[name], abs=1e-4), name


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs gcore-rollout[vllm]")
def test_vllm_engine(vllm_cli: Cli, own_args: list[str]) -> None:
    finished = vllm_cli(*own_args, "--rollout.engine", "vllm")
    assert finished.code == 0, finished
    rows = step_rows(vllm_cli.cwd / "runs/default")
    assert len(rows) == 2
    # Two engines, one policy: the trainer finds vLLM's log-probs to be its own, after an update too.
    assert all(row["training/rollout_probs_diff_mean"] < 1e-4 for row in rows)
    assert all(abs(row["actor/ppo_kl"]) < 1e-4 for row in rows)
