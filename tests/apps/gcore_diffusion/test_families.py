"""Runs on pipelines of other families: conditions of dicts and lists, negated outputs, videos."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from command_line import Cli, Server, step_rows, write_rows
from tiny_families import FAMILIES

from gcore_ckpt import Checkpointer
from gcore_diffusion.config import DiffusionActorConfig, DiffusionConfig, embedded_nft
from gcore_diffusion.sampling.image_sampling import ImageGroup
from gcore_diffusion.sampling.prompts import ImagePrompt
from gcore_diffusion.sampling.shared_arrays import share_conditions
from gcore_rollout import DiffusersEngine, FlowSDE, ImageRequest, ImageSample, ImageSampling
from gcore_runs import UserError

REWARD = "def bright(pixels, prompts, rows):\n    return [float(each.mean()) for each in pixels]\n"
DDPO = ("--rollout.kernel", "ddim", "--rollout.noise-level", "1", "--algorithm.name", "ddpo")
NFT = ("--rollout.kernel", "ode", "--algorithm.name", "nft")
RUNS = {
    "Stable Diffusion XL": (*DDPO, "--rollout.guidance-scale", "2"),
    "Z-Image": (*NFT, "--rollout.guidance-scale", "2", "--actor.lora-rank", "2"),
    "Wan 2.2 of two transformers": (
        *("--rollout.num-frames", "5", "--actor.component", "transformer_2"),
        *("--rollout.window-size", "1", "--rollout.window-range", "1", "3"),
    ),
    # Its frames are scored, too, by a reward of images.
    "Wan 2.1": (
        *("--rollout.num-frames", "5", "--rollout.guidance-scale", "2", "--reward.num-frames", "2"),
        *("--reward.kind", "rewards.py:bright + jpeg_incompressibility"),
    ),
}


@pytest.fixture
def cli(diffusion_server: Server, tmp_path: Path) -> Cli:
    return Cli(diffusion_server, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run(cli: Cli, name: str) -> None:
    """Samples, scores, updates, evaluates and writes the pipeline, from a folder."""
    family = FAMILIES[name]
    family.make(cli.cwd).save_pretrained(cli.cwd / "pipeline")
    (cli.cwd / "rewards.py").write_text(REWARD)
    write_rows(
        cli.cwd / "train.jsonl",
        ({"prompt": f"{word} {i}"} for i in range(4) for word in ("red", "a blue")),
    )
    assert family.size is not None
    finished = cli(
        *("train", "--threads", "1", "--device", "cpu", "--model", "pipeline"),
        *("--data.train-files", "train.jsonl", "--reward.kind", "rewards.py:bright"),
        *("--data.train-batch-size", "2", "--rollout.n", "2", "--rollout.num-inference-steps", "3"),
        *(
            "--rollout.eval-n",
            "1",
            "--trainer.total-training-steps",
            "1",
            "--trainer.tensorboard",
            "False",
        ),
        *("--rollout.size", *map(str, family.size)),
        *(
            ("--rollout.max-sequence-length", "16")
            if "max_sequence_length" in family.options
            else ()
        ),
        *RUNS[name],
    )
    assert (finished.code, finished.err) == (0, "")
    [row] = step_rows(cli.cwd / "runs/default")
    assert row["actor/grad_norm"] > 0
    assert row.get("training/rollout_ratio_dev", 0.0) < 1e-5
    assert (cli.cwd / "runs/default/export/model_index.json").is_file()
    own = {
        file.parent.name: file
        for file in cli.cwd.glob("pipeline/*/diffusion_pytorch_model.safetensors")
    }
    exported = {
        name: cli.cwd / "runs/default/export" / name / file.name for name, file in own.items()
    }
    changed = {
        name for name, file in own.items() if file.read_bytes() != exported[name].read_bytes()
    }
    assert changed == {family.component or ("unet" if "unet" in own else "transformer")}


def test_algorithms_of_one_transformer_of_two() -> None:
    """Need steps that are its own."""
    actor = DiffusionActorConfig(component="transformer_2")
    with pytest.raises(
        UserError, match=r"rollout.window_size is 0; expected 1 or more with actor.component"
    ):
        DiffusionConfig(actor=actor)
    with pytest.raises(
        UserError,
        match=r"actor.component is 'transformer_2'; expected '' with algorithm.name 'nft'",
    ):
        replace(embedded_nft(), actor=actor)


async def test_a_checkpoint_keeps_conditions(tmp_path: Path) -> None:
    """Arrays, nested values and tuples come back as they were, and what images share is there once."""
    family = FAMILIES["Qwen-Image"]
    engine = DiffusersEngine(
        family.make(tmp_path).to(torch.bfloat16), options=family.options, size=family.size
    )
    kernel = FlowSDE(noise_level=0.7)
    sampling = ImageSampling(
        num_inference_steps=2, guidance_scale=2.0, kernel=kernel, size=family.size
    )
    requests = [ImageRequest(request_id="a", prompt="red 7", sampling=sampling, n=2)]
    samples = [sample async for sample in engine.generate(requests)]
    await engine.close()
    group = ImageGroup(
        prompt_index=3,
        prompt=ImagePrompt(text="red 7", row={}),
        samples=samples,
        scores=np.zeros(2),
        parts=[{}, {}],
    )
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(1, {"group": group.state()})
        checkpointer.wait()
        found = ImageGroup.from_state(checkpointer.load(step=1)["group"])
    for images in (samples, found.samples):
        own = [image.conditions["encoder_hidden_states"] for image in images]
        assert own[0] is own[1]
        assert own[0].dtype == images[0].trajectory.latents.dtype == ml_dtypes.bfloat16
    for one, other in zip(found.samples, samples, strict=True):
        np.testing.assert_array_equal(one.trajectory.latents, other.trajectory.latents)
        assert one.conditions["img_shapes[]"] == other.conditions["img_shapes[]"] == [(1, 2, 2)]
        assert one.shared_conditions == other.shared_conditions == {"attention_kwargs": {}}
        assert one.timestep_map == other.timestep_map
        assert (one.guidance_scale, one.keeps_norm, one.is_negated) == (2.0, True, False)
        for own, expected in (
            (one.conditions, other.conditions),
            (one.negative_conditions, other.negative_conditions),
        ):
            assert own is not None
            assert expected is not None
            np.testing.assert_array_equal(
                own["encoder_hidden_states"], expected["encoder_hidden_states"]
            )


def test_images_of_several_batches_share_equal_conditions() -> None:
    """Each engine, and each of its batches, has arrays of its own."""

    def image(index: int, value: float) -> ImageSample:
        empty, made = (
            ImageRequest(
                request_id="a", prompt="red", sampling=ImageSampling(num_inference_steps=1)
            ),
            {},
        )
        made["conditions"] = {
            "embeddings": np.full((3, 4), value, np.float32),
            "scale": np.float32(value),
            "n": 3,
        }
        return replace(
            empty.aborted(index),
            **made,
            negative_conditions={"embeddings": np.zeros((3, 4), np.float32)},
        )

    known: dict[bytes, Any] = {}
    group = share_conditions([image(0, 1.0), image(1, 1.0)], known)
    other = share_conditions([image(0, 2.0)], known)
    assert group[0].conditions["embeddings"] is group[1].conditions["embeddings"]
    assert group[0].conditions["embeddings"] is not other[0].conditions["embeddings"]
    assert other[0].negative_conditions is not None
    assert group[0].negative_conditions is not None
    assert other[0].negative_conditions["embeddings"] is group[0].negative_conditions["embeddings"]
    assert len(known) == 3
    assert (other[0].conditions["scale"], other[0].conditions["n"]) == (2.0, 3)
