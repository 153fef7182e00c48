"""Runs on pipelines of other families: conditions of dicts and lists, negated outputs, videos."""

from pathlib import Path

import numpy as np
import pytest
from command_line import Cli, Server, step_rows, write_rows
from tiny_families import FAMILIES

from gcore_ckpt import Checkpointer
from gcore_diffusion.sampling.image_sampling import Group
from gcore_diffusion.sampling.prompts import Prompt
from gcore_rollout import DiffusersEngine, ImageRequest, ImageSampling

REWARD = "def bright(pixels, prompts, rows):\n    return [float(each.mean()) for each in pixels]\n"
DDPO = ("--rollout.kernel", "ddim", "--rollout.noise-level", "1", "--algorithm.name", "ddpo")
NFT = ("--rollout.kernel", "ode", "--algorithm.name", "nft")
RUNS = {
    "Stable Diffusion XL": (*DDPO, "--rollout.guidance-scale", "2"),
    "Z-Image": (*NFT, "--rollout.guidance-scale", "2", "--actor.lora-rank", "2"),
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
    write_rows(cli.cwd / "train.jsonl", ({"prompt": f"{word} {i}"} for i in range(4) for word in ("red", "a blue")))
    assert family.size is not None
    finished = cli(
        *("train", "--threads", "1", "--device", "cpu", "--model", "pipeline"),
        *("--data.train-files", "train.jsonl", "--reward.kind", "rewards.py:bright"),
        *("--data.train-batch-size", "2", "--rollout.n", "2", "--rollout.num-inference-steps", "3"),
        *("--rollout.eval-n", "1", "--trainer.total-training-steps", "1", "--trainer.tensorboard", "False"),
        *("--rollout.size", *map(str, family.size)),
        *(("--rollout.max-sequence-length", "16") if "max_sequence_length" in family.options else ()),
        *RUNS[name],
    )
    assert (finished.code, finished.err) == (0, "")
    [row] = step_rows(cli.cwd / "runs/default")
    assert row["actor/grad_norm"] > 0
    assert row.get("training/rollout_ratio_dev", 0.0) < 1e-5
    assert (cli.cwd / "runs/default/export/model_index.json").is_file()


async def test_a_checkpoint_keeps_conditions(tmp_path: Path) -> None:
    """Arrays, nested values and tuples come back as they were."""
    family = FAMILIES["Qwen-Image"]
    engine = DiffusersEngine(family.make(tmp_path), options=family.options, size=family.size)
    sampling = ImageSampling(num_inference_steps=2, guidance_scale=2.0, size=family.size)
    requests = [ImageRequest(request_id="a", prompt="red 7", sampling=sampling, n=2)]
    samples = [sample async for sample in engine.generate(requests)]
    await engine.close()
    group = Group(
        prompt_index=3, prompt=Prompt(text="red 7", row={}), samples=samples, scores=np.zeros(2), parts=[{}, {}]
    )
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(1, {"group": group.state()})
        checkpointer.wait()
        found = Group.from_state(checkpointer.load(step=1)["group"])
    for one, other in zip(found.samples, samples, strict=True):
        assert one.conditions["img_shapes[]"] == other.conditions["img_shapes[]"] == [(1, 2, 2)]
        assert one.shared_conditions == other.shared_conditions == {"attention_kwargs": {}}
        assert one.timestep_map == other.timestep_map
        assert (one.guidance_scale, one.keeps_norm, one.is_negated) == (2.0, True, False)
        for own, expected in ((one.conditions, other.conditions), (one.negative_conditions, other.negative_conditions)):
            assert own is not None
            assert expected is not None
            np.testing.assert_array_equal(own["encoder_hidden_states"], expected["encoder_hidden_states"])
