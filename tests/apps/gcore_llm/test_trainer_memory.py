"""Settings of the trainer's memory: the same run in less of it."""

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Cli, option_set, step_rows

from gcore_ckpt import Checkpointer
from gcore_llm.config import TrainConfig
from gcore_llm.learning.config import AlgorithmConfig
from gcore_llm.learning.device_plan import (
    check_host_fits,
    choose_checkpointing,
    describe_checkpointing,
    plan_memory,
)
from gcore_llm.learning.trainer_worker import LLMTrainerWorker, megatron_config
from gcore_llm.recipes.shapes import shape_folder
from gcore_llm.sections import ActorConfig, ActorOptimConfig
from gcore_llm.training import train
from gcore_placement import Device
from gcore_runs import UserError, resolve
from gcore_runs.host_memory import available_host_bytes, host_memory
from gcore_runs.inputs import count_parameters
from gcore_runs.run_folder import open_run
from gcore_runs.settings.parsing import to_toml
from gcore_trainer import KLControlConfig, Sample, TrainerError

SAVING = [
    *("--actor.offload", "all", "--actor.activation-offload", "true"),
    *("--actor.enable-gradient-checkpointing", "0.5"),
]


@pytest.mark.slow
def test_a_run_in_less_memory_is_the_same_run(cli: Cli, own_args: list[str]) -> None:
    """With a critic and a reference, which take turns with the policy; it resumes, and another run resumes it."""
    options = [
        "--algorithm.adv-estimator",
        "gae",
        "--actor.loss.kl-loss-coef",
        "0.1",
        "--trainer.save-freq",
        "1",
    ]
    three = option_set(own_args, "--trainer.total-training-steps", "3")
    cli.ok(*three, *options, "--name", "plain")
    cli.ok(*own_args, *options, *SAVING, "--name", "saving")
    cli.ok(*three, *options, *SAVING, "--name", "saving")
    rows, others = (step_rows(cli.cwd / "runs" / name) for name in ("saving", "plain"))
    assert len(rows) == len(others) == 3
    for row, other in zip(rows, others, strict=True):
        for name in (
            "actor/pg_loss",
            "actor/grad_norm",
            "actor/kl_loss",
            "critic/vf_loss",
            "critic/score/mean",
        ):
            assert row[name] == other[name], name


@pytest.mark.slow
def test_a_run_in_bfloat16(cli: Cli, own_args: list[str]) -> None:
    cli.ok(*own_args, "--dtype", "bfloat16", "--actor.offload", "optimizer", "--name", "rounded")
    rows = step_rows(cli.cwd / "runs/rounded")
    assert rows
    assert all(
        abs(row["training/rollout_k3_kl"]) < 0.05 for row in rows if "training/rollout_k3_kl" in row
    )


@pytest.mark.slow
def test_a_run_with_8_bit_moments_and_compiled_layers_resumes(
    cli: Cli, own_args: list[str]
) -> None:
    options = [
        "--actor.optim.name",
        "adamw_8bit",
        "--actor.compile",
        "--trainer.save-freq",
        "1",
        "--name",
        "small",
    ]
    # Not `ok`: where a CUDA toolkit is installed without a GPU, Inductor says so on stderr.
    for count in ("1", "2"):
        finished = cli(*option_set(own_args, "--trainer.total-training-steps", count), *options)
        assert finished.code == 0, finished
    rows = step_rows(cli.cwd / "runs/small")
    assert len(rows) == 2
    assert all(
        abs(row["training/rollout_k3_kl"]) < 1e-4 for row in rows if "training/rollout_k3_kl" in row
    )


def test_the_data_type_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(TrainConfig(device="cpu")).dtype == "float32"
    assert resolve(TrainConfig(device="cpu", dtype="bfloat16")).dtype == "bfloat16"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve(TrainConfig(device="cuda")).dtype == "bfloat16"
    assert resolve(TrainConfig(device="cuda", dtype="float32")).dtype == "float32"


@pytest.mark.parametrize(
    ("stored", "expected"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("auto", "bfloat16")]
)
def test_a_resumed_run_keeps_its_data_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stored: Any, expected: str
) -> None:
    """Also one that began when auto was float32 on a GPU; a folder without a checkpoint is started again."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = TrainConfig(device="cuda", runs_dir=str(tmp_path), threads=1)
    run = tmp_path / config.name
    run.mkdir()
    (run / "config.toml").write_text(to_toml(replace(config, dtype=stored)))
    assert resolve(config).dtype == "bfloat16"
    (run / "checkpoints/step_1").mkdir(parents=True)
    assert resolve(config).dtype == expected
    assert resolve(replace(config, resume="never")).dtype == "bfloat16"
    assert resolve(replace(config, dtype="float32")).dtype == "float32"
    with Checkpointer(tmp_path / "other") as checkpointer:
        checkpointer.save(1, {"step": 1})
    shutil.rmtree(run / "checkpoints")
    (tmp_path / "other").rename(run / "checkpoints")
    assert open_run(resolve(config)).path == run


def test_muon_does_not_update_on_the_host() -> None:
    with pytest.raises(
        UserError,
        match=r"actor.offload is 'optimizer'; expected 'none' with actor.optim.name 'muon'",
    ):
        ActorConfig(optim=ActorOptimConfig(name="muon"), offload="optimizer")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"offload": "all"},
            "actor.offload is 'all'; expected 'none' or 'optimizer' with trainer.backend 'megatron'",
        ),
        ({"activation_offload": True}, "actor.activation_offload is true; expected false with"),
        (
            {"compile": True},
            "actor.compile is true; expected false with trainer.backend 'megatron'",
        ),
        (
            {"optim": ActorOptimConfig(name="adamw_8bit")},
            "actor.optim.name is 'adamw_8bit'; expected 'adamw' with",
        ),
        (
            {"optim": ActorOptimConfig(name="muon")},
            "actor.optim.name is 'muon'; expected 'adamw' with",
        ),
        (
            {"enable_gradient_checkpointing": 0.5},
            r"actor.enable_gradient_checkpointing is 0.5; expected auto, true or false with",
        ),
    ],
)
def test_settings_of_torch_with_megatron_are_refused(changes: dict[str, Any], message: str) -> None:
    config = TrainConfig()
    with pytest.raises(UserError, match=message):
        replace(
            config,
            trainer=replace(config.trainer, backend="megatron"),
            actor=replace(config.actor, **changes),
        )


def test_a_run_with_8_bit_moments_is_saved_and_loaded(tiny: Path, tmp_path: Path) -> None:
    """Its checkpoints have float32 moments: a run with exact ones continues them, too."""
    actor = ActorConfig(optim=ActorOptimConfig(name="adamw_8bit", lr=1e-3))
    config = TrainConfig(device="cpu", dtype="float32", actor=actor)
    exact = replace(config, actor=replace(actor, optim=replace(actor.optim, name="adamw")))
    workers = [
        LLMTrainerWorker(own, tiny, tmp_path / "checkpoints") for own in (config, config, exact)
    ]
    for _ in range(2):
        workers[0].train_step("actor", BATCH)
    workers[0].save(1, {"step": 1, "controllers": None})
    workers[0].close()
    for worker in workers[1:]:
        worker.load()
    first, *others = [worker.trainers["actor"].state() for worker in workers]
    assert first["exp_avg"].keys() == first["model"].keys()
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-6, atol=0)
    metrics = [worker.train_step("actor", BATCH) for worker in workers]
    for other in metrics[1:]:
        assert other["actor/grad_norm"] == pytest.approx(metrics[0]["actor/grad_norm"], rel=1e-5)
    for worker in workers[1:]:
        worker.close()


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # Dynamo looks at all tensors
def test_a_run_with_compiled_layers_is_the_same_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a C++ compiler graphs run operation by operation, which takes less time here.
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    found: list[dict[str, float]] = []
    for is_compiled in (False, True):
        actor = ActorConfig(optim=ActorOptimConfig(lr=1e-3), compile=is_compiled)
        config = TrainConfig(device="cpu", dtype="float32", algorithm=ALGORITHM, actor=actor)
        worker = LLMTrainerWorker(config, tiny, tmp_path / str(is_compiled))
        scores = {
            role: worker.score(role, BATCH, with_routing=False)[0][0][0]
            for role in ("reference", "critic")
        }
        found.append(scores | worker.train_step("actor", BATCH))
        worker.close()
    names = ("reference", "critic", "actor/pg_loss", "actor/grad_norm", "actor/entropy")
    plain, other = ([own[name] for name in names] for own in found)
    assert other == pytest.approx(plain, rel=1e-5, abs=1e-6)
    with pytest.raises(
        UserError, match=r"actor.compile is true; expected false with actor.activation_offload"
    ):
        TrainConfig(actor=ActorConfig(compile=True, activation_offload=True))


def test_a_plan_knows_the_bytes_of_moments(tiny: Path) -> None:
    config = TrainConfig(model=str(tiny), device="cpu", dtype="bfloat16")
    small = replace(config, actor=replace(config.actor, optim=ActorOptimConfig(name="adamw_8bit")))
    optimizer = [
        plan_memory(own, tiny, Device.named("H100")).roles["trainer"]["optimizer"]
        for own in (config, small)
    ]
    assert optimizer[1] == pytest.approx(optimizer[0] * 6.03125 / 12)


BATCH = [
    [
        Sample(
            prompt_ids=np.arange(2, 9),
            response_ids=np.arange(3, 8),
            advantages=np.ones(5, np.float32),
        )
    ]
]
ALGORITHM = AlgorithmConfig(
    adv_estimator="gae", old_log_probs="trainer", kl_ctrl=KLControlConfig(kl_coef=0.01)
)


def parameters_of(worker: LLMTrainerWorker, role: str) -> list[torch.nn.Parameter]:
    model = worker.models[role]
    return list((model._packed if role == "reference" else model._model).model.parameters())


def held_bytes(worker: LLMTrainerWorker, role: str) -> int:
    """Bytes of a model's parameters and gradients."""
    parameters = parameters_of(worker, role)
    tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def take_memory(worker: LLMTrainerWorker) -> None:
    """Put parameters in memory that can be freed: on a CPU that of a mapped file cannot, nor that of a NumPy array."""
    for role in worker.roles:
        worker.models[role].wake()
        for parameter in parameters_of(worker, role):
            parameter.data = parameter.data.clone()


@pytest.fixture(params=["none", "all"])
def worker(
    request: pytest.FixtureRequest, tiny: Path, tmp_path: Path
) -> Iterator[LLMTrainerWorker]:
    """A policy after an update, a critic and a reference."""
    actor = ActorConfig(offload=request.param)
    config = TrainConfig(device="cpu", dtype="float32", algorithm=ALGORITHM, actor=actor)
    worker = LLMTrainerWorker(config, tiny, tmp_path / "checkpoints")
    take_memory(worker)
    worker.train_step("actor", BATCH)
    yield worker
    worker.close()


def outcomes(worker: LLMTrainerWorker, step: int, folder: Path) -> dict[str, Callable[[], Any]]:
    """What is saved and exported, by the call that makes it."""

    def saved() -> Any:
        worker.save(step, {"step": step, "controllers": None})
        worker._checkpointer.wait()  # pyright: ignore[reportPrivateUsage]  # it is written in the background
        return Checkpointer(folder.parent / "checkpoints").load()

    def written() -> bytes:
        worker.save_pretrained(folder)
        return (folder / "model.safetensors").read_bytes()

    return {
        "save": saved,
        "export": lambda: {name: tensor.clone() for name, tensor in worker.export_weights()},
        "pretrained": written,
        "score": lambda: worker.score("actor", BATCH, with_routing=False),
    }


def test_what_sleeps_is_saved_and_exported_in_any_order(
    worker: LLMTrainerWorker, tmp_path: Path
) -> None:
    expected = {name: call() for name, call in outcomes(worker, 0, tmp_path / "awake").items()}
    for step, names in enumerate(permutations(("save", "export", "pretrained")), start=1):
        # A checkpoint reads them as NumPy arrays.
        take_memory(worker)
        worker.sleep()
        assert {role: held_bytes(worker, role) for role in worker.roles} == dict.fromkeys(
            worker.roles, 0
        )
        with pytest.raises(TrainerError, match=r"asleep.*expected a call of wake\(\) before"):
            worker.score("actor", BATCH, with_routing=False)
        calls = outcomes(worker, step, tmp_path / str(step))
        for name in (*names, "score"):
            found = calls[name]()
            if name == "save":
                assert found.pop("step") == step
                found["step"] = 0
            if name == "pretrained":
                assert found == expected[name]
            else:
                torch.testing.assert_close(found, expected[name], rtol=0, atol=0)
    worker.train_step("actor", BATCH)
    worker.sleep()
    assert worker.load()["step"] == 6
    worker.wake()
    torch.testing.assert_close(
        outcomes(worker, 7, tmp_path)["score"](), expected["score"], rtol=0, atol=0
    )


@pytest.mark.parametrize("worker", ["all"], indirect=True)
def test_the_memory_law_follows_full_offload(worker: LLMTrainerWorker, tiny: Path) -> None:
    """The model at work has its parameters and gradients on the device, and the others have nothing there."""
    config = TrainConfig(
        model=str(tiny), dtype="float32", algorithm=ALGORITHM, actor=ActorConfig(offload="all")
    )
    trainer = plan_memory(config, tiny, Device.named("H100")).roles["trainer"]
    assert held_bytes(worker, "actor") == trainer["weights"] + trainer["gradients"]
    assert trainer["optimizer"] == 0
    assert held_bytes(worker, "critic") == held_bytes(worker, "reference") == 0
    worker.score("reference", BATCH, with_routing=False)
    assert held_bytes(worker, "reference") == trainer["weights"]
    assert held_bytes(worker, "actor") == held_bytes(worker, "critic") == 0


def test_a_missing_library_is_refused_before_anything_is_loaded(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the files with the prompts and the reward, too: there are none."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    actor = ActorConfig(optim=ActorOptimConfig(name="adamw_8bit"))
    config = TrainConfig(
        model=str(tiny), device="cpu", dtype="float32", reward="no.py:reward", actor=actor
    )
    config = replace(config, data=replace(config.data, train_files=("no.jsonl",)))
    message = (
        "name is 'adamw_8bit', and 'bitsandbytes' is not installed: pip install 'gcore-trainer"
    )
    with pytest.raises(TrainerError, match=message):
        train(config)


@pytest.mark.parametrize(
    ("sync", "gigabytes", "waits"),
    [("update", 1e-3, True), ("auto", 80, True), ("auto", 1e-3, False), ("micro_batch", 80, False)],
)
def test_the_plan_counts_gradients_that_wait(
    tiny: Path, sync: Any, gigabytes: float, waits: bool
) -> None:
    config = TrainConfig(
        model=str(tiny), dtype="float32", actor=ActorConfig(ppo_max_token_len=1536)
    )
    parallel = replace(config.trainer.parallel, gradient_sync=sync)
    config = replace(config, trainer=replace(config.trainer, num_processes=2, parallel=parallel))
    found = plan_memory(config, tiny, Device.of_memory("a GPU", gigabytes * 1e9)).roles["trainer"][
        "unsynced gradients"
    ]
    assert found == waits * 4 * count_parameters(tiny)


def test_a_run_that_needs_too_much_host_memory_is_refused_with_the_numbers(tiny: Path) -> None:
    config = TrainConfig(model=str(tiny), dtype="bfloat16", actor=ActorConfig(offload="optimizer"))
    config = replace(config, rollout=replace(config.rollout, colocated=True))
    config = replace(config, trainer=replace(config.trainer, num_processes=2))
    plan = plan_memory(config, tiny, Device.named("H100"))
    count = count_parameters(tiny)
    # Of both ranks together: states of 16 bytes, weights, and a checkpoint's 12; the engine's weights are there once,
    # and so are new ones.
    needed = (16 + 2 + 12 + 2 + 2) * count
    check_host_fits(config, plan, needed * 1.001)
    with pytest.raises(
        UserError, match=r"needs 0\.0 GB of the host's memory; expected at most"
    ) as refused:
        check_host_fits(config, plan, needed * 0.999)
    for setting in ("actor.offload none", "rollout.colocated false", "actor.lora_rank 16"):
        assert setting in str(refused.value)
    assert 1e8 < available_host_bytes() <= host_memory().total_bytes


@pytest.mark.parametrize("gigabytes", [20, 24, 28, 32, 36, 40, 48, 80])
def test_auto_checkpoints_as_few_layers_as_fit(gigabytes: int) -> None:
    """Of 24 layers, by parts of three; it never makes trainer and engine take turns."""
    device, model = (
        Device.of_memory("a GPU", gigabytes * 1e9),
        shape_folder("Qwen2.5-0.5B-Instruct"),
    )
    config = TrainConfig(model=str(model), dtype="bfloat16")

    def with_layers(count: int) -> TrainConfig:
        share = count > 0 if count in (0, 24) else count / 24
        return replace(config, actor=replace(config.actor, enable_gradient_checkpointing=share))

    plans = {count: plan_memory(with_layers(count), model, device) for count in range(0, 25, 3)}
    chosen, plan = choose_checkpointing(config, model, device)
    if not plans[24].fits:
        assert (chosen, plan.fits) == (config, False)
        return
    assert plan.fits
    alike = [n for n, own in plans.items() if own.fits and own.takes_turns == plans[24].takes_turns]
    assert chosen == with_layers(min(alike))
    # What is set stays.
    for setting in (True, False):
        own = replace(config, actor=replace(config.actor, enable_gradient_checkpointing=setting))
        assert choose_checkpointing(own, model, device)[0] is own


@pytest.mark.parametrize(
    ("gigabytes", "expected"), [(48, "full"), (80, "selective"), (141, "none")]
)
def test_auto_recomputes_as_little_as_fits_with_megatron(gigabytes: int, expected: str) -> None:
    """48 GB hold trainer and engine side by side only if whole layers are computed again."""
    device = Device.of_memory("a GPU", gigabytes * 1e9)
    model = shape_folder("Qwen2.5-1.5B-Instruct")
    config = TrainConfig(model=str(model), dtype="bfloat16")
    config = replace(config, trainer=replace(config.trainer, backend="megatron", num_processes=2))

    def chosen_by(config: TrainConfig) -> str:
        chosen, plan = choose_checkpointing(config, model, device)
        assert plan.fits
        setting = chosen.actor.has_checkpointing
        return megatron_config(chosen.trainer, setting, "cuda").recompute_granularity

    assert chosen_by(config) == expected
    lines = describe_checkpointing(choose_checkpointing(config, model, device)[0], is_auto=True)
    assert ("MLPs and experts" in " ".join(lines)) == (expected == "selective")
    # What is set stays.
    for granularity in ("full", "selective"):
        own = {"recompute_granularity": granularity}
        assert (
            chosen_by(replace(config, trainer=replace(config.trainer, megatron=own))) == granularity
        )
