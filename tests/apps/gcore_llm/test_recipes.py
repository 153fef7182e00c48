"""Recipes of large models: resolved, mapped, planned and dry-run with the true shapes of their models."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gcore_llm import TrainConfig
from gcore_llm.cli import main
from gcore_llm.learning.cluster_plan import plan_cluster
from gcore_llm.learning.device_plan import plan_memory, shape_of
from gcore_llm.recipes.large import LARGE
from gcore_llm.recipes.shapes import shape_folder
from gcore_placement import Device

H100 = Device.named("H100")
PARAMETERS = {
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen2.5-VL-7B-Instruct": 8_292_166_656,
}
"""Numbers that the files of the published models hold."""
GPUS = {
    "qwen2_5_0_5b_gsm8k": 1,
    "qwen2_5_1_5b_gsm8k": 1,
    "qwen2_5_7b_gsm8k": 8,
    "qwen3_32b_gsm8k": 64,
    "qwen3_30b_a3b_gsm8k": 32,
    "qwen2_5_vl_7b_geo3k": 8,
    "qwen2_5_7b_dapo": 32,
}


def planned(name: str) -> tuple[TrainConfig, Path]:
    """A recipe as its run on H100s would have it, and the folder of its model's shape."""
    config = replace(LARGE[name](), dtype="bfloat16")
    return config, shape_folder(config.model)


@pytest.mark.parametrize("model", PARAMETERS)
def test_shapes_are_those_of_the_published_models(model: str) -> None:
    assert shape_of(shape_folder(model)).num_parameters == PARAMETERS[model]


def test_shapes_are_read_by_transformers_alike() -> None:
    """On the meta device, where a model has shapes and no memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    for model in ("Qwen2.5-0.5B-Instruct", "Qwen3-30B-A3B", "Qwen2.5-VL-7B-Instruct"):
        config: Any = AutoConfig.from_pretrained(shape_folder(model))
        kind: Any = AutoModelForImageTextToText if "VL" in model else AutoModelForCausalLM
        # All layers are alike.
        own, few = shape_of(shape_folder(model)), 2
        text = config.get_text_config()
        num_layers, text.num_hidden_layers = text.num_hidden_layers, few
        if "layer_types" in text.to_dict():
            text.layer_types = text.layer_types[:few]
        with torch.device("meta"):
            count = sum(p.numel() for p in kind.from_config(config).parameters())
        layer = (own.num_parameters - own.other_parameters - own.num_outer_parameters) // num_layers
        assert count == own.num_parameters - (num_layers - few) * layer


@pytest.mark.parametrize("name", LARGE)
def test_a_recipe_fits_on_the_gpus_that_it_is_for(name: str) -> None:
    config, model = planned(name)
    if GPUS[name] == 1:
        assert config.runtime == "inline"
        assert plan_memory(replace(config, device="cuda"), model, H100).fits
        return
    found = plan_cluster(config, model, H100)
    assert found.cluster.num_devices == GPUS[name]
    used = {
        slot
        for processes in found.device_map.slots_by_role().values()
        for slots in processes
        for slot in slots
    }
    assert len(used) == GPUS[name], "no GPU is without work"
    assert found.tightest.fits
    assert 1 < found.step.total_s < 3600


@pytest.mark.slow
def test_the_layout_of_megatron_is_one_that_it_takes() -> None:
    from transformers import AutoConfig

    from gcore_trainer.megatron.architecture import Architecture

    config, model = planned("qwen3_30b_a3b_gsm8k")
    Architecture(AutoConfig.from_pretrained(model)).check_layout(
        config.trainer.parallel, config.trainer.num_processes
    )


@pytest.mark.parametrize("name", LARGE)
def test_a_recipe_says_what_was_run(name: str) -> None:
    assert "Planned only; no GPU has run it." in " ".join((LARGE[name].__doc__ or "").split())


def run(*arguments: str) -> int:
    """Run the command in this process, and return its exit code."""
    try:
        main(["train", "--dry-run", *arguments])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_experts_are_divided_over_their_ranks() -> None:
    """By hand: 32 ranks of TP 4, PP 2, DP 4 and EP 4, of 128 experts in 48 layers."""
    config, model = planned("qwen3_30b_a3b_gsm8k")
    roles = (
        plan_cluster(config, model, H100).memory["policy engine", "training rank"].roles["trainer"]
    )
    hidden, inner, heads, kv_heads, width, vocab = 2048, 768, 32, 4, 128, 151_936
    attention = hidden * (2 * heads + 2 * kv_heads) * width + 2 * width
    layer = attention + 2 * hidden + hidden * 128
    experts = 24 * 128 * 3 * hidden * inner / 4
    held = (24 * layer + hidden * (vocab + 1)) / 4 + experts
    assert roles["weights"] == pytest.approx(2 * held, rel=1e-6)
    assert roles["gradients"] == pytest.approx(4 * held, rel=1e-6)
    # Master weights and moments of all parameters of a stage are on its 16 ranks, once.
    stage = 24 * layer + hidden * (vocab + 1) + 24 * 128 * 3 * hidden * inner
    assert roles["optimizer"] == pytest.approx(12 * stage / 16, rel=1e-6)


def test_a_model_that_is_too_large_is_refused_with_what_would_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = run(
        "--recipe",
        "qwen3_32b_gsm8k",
        "--dry-run-device",
        "72",
        "--rollout.tensor-parallel-size",
        "1",
        "--rollout.num-processes",
        "64",
    )
    output = capsys.readouterr()
    assert code == 2
    assert output.out.splitlines()[-1] == "does not fit"
    assert "model is 'Qwen3-32B' (32.76 B parameters), whose stage 'generate' needs" in output.err
    assert "these would fit: rollout.tensor_parallel_size 2 (" in output.err
    code = run(
        "--recipe",
        "qwen2_5_7b_dapo",
        "--dry-run-device",
        "24",
        "--rollout.tensor-parallel-size",
        "8",
    )
    output = capsys.readouterr()
    assert code == 2
    assert "whose stage 'train' needs" in output.err
    assert "predicted" not in output.out, (
        "rates of a device of which only the memory is known are not"
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--trainer.num-processes", "16", "--trainer.parallel.context-parallel-size", "16"],
            "trainer.parallel.context_parallel_size is 16; expected at most 8, the devices of a node",
        ),
        (
            ["--dry-run-nodes", "1", "--rollout.num-processes", "5"],
            "rollout.num_processes is 5; expected at most 4, each of 2 of what is free of 8 devices in nodes of 8",
        ),
        (
            ["--dry-run-gpus-per-node", "1"],
            "rollout.tensor_parallel_size is 2; expected at most 1, the devices of a node",
        ),
        (
            ["--runtime", "inline", "--dry-run-gpus-per-node", "8", "--rollout.num-processes", "0"],
            "rollout.num_processes is 0; expected 1 or more with dry_run_gpus_per_node",
        ),
    ],
)
def test_what_has_no_place_is_named(
    options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--recipe", "qwen2_5_7b_gsm8k", *options) == 2
    output = capsys.readouterr()
    assert expected in output.err
    assert "│" not in output.out


def test_ranks_and_engines_of_one_machine_have_gpus_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [
        "--runtime",
        "inline",
        "--dry-run-gpus-per-node",
        "8",
        "--rollout.colocated",
        "false",
    ]
    sizes = ["--trainer.num-processes", "4", "--rollout.num-processes", "2", "--controllers", "1"]
    assert run("--recipe", "qwen2_5_7b_gsm8k", *options, *sizes) == 0
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
    ]
    places = [row[1:4] for row in rows if len(row) == 5]
    assert places == [
        *[[str(gpu), "", str(gpu)] for gpu in range(4)],
        *[[str(gpu), str((gpu - 4) // 2), ""] for gpu in range(4, 8)],
    ]


def test_a_judge_is_mapped_and_planned(tmp_path: Path) -> None:
    """Side by side with the policy's engines, and by turns with them on each of their devices."""
    config, model = planned("qwen2_5_7b_gsm8k")
    judge = replace(
        config.reward_model.judge, engine="vllm", num_processes=1, tensor_parallel_size=2
    )
    judged = replace(config.reward_model, kind="judge", path=str(model), judge=judge)
    rollout = replace(config.rollout, num_processes=3)
    dynamic = replace(
        config,
        reward_model=judged,
        rollout=rollout,
        placement=replace(config.placement, strategy="dynamic"),
    )
    found = plan_cluster(dynamic, model, H100)
    assert set(found.memory) == {("policy engine", "training rank"), ("judge", "training rank")}
    assert found.tightest.fits
    assert found.step.reward_s > 0
    turns = replace(
        config,
        reward_model=replace(judged, judge=replace(judge, num_processes=4)),
        placement=replace(config.placement, strategy="colocated"),
    )
    found = plan_cluster(turns, model, H100)
    assert [*found.memory] == [("policy engine", "judge", "training rank")]
    [plan] = found.memory.values()
    shares = [plan.share(role) for role in ("policy engine", "judge")]
    assert plan.peaks["generate"] == pytest.approx(max(shares)), "one of the two is asleep"


def test_a_folder_needs_a_config_and_no_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = json.loads((shape_folder("Qwen2.5-0.5B-Instruct") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert run("--model", str(tmp_path), "--rollout.engine", "vllm") == 0
    assert "988,065,536" in capsys.readouterr().out
    assert run("--recipe", "qwen2_5_7b_gsm8k", "--model", str(tmp_path / "none")) == 2
    assert "expected a Hugging Face folder with config.json" in capsys.readouterr().err
