"""The tables of models that packed training computes, from sweeps over tiny models of every type.

``python tests/gcore_trainer/model_table.py`` writes them to docs/reference/models.md.
"""

import re
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import MODEL_TYPES, UNBUILT, WINDOW, tiny_config
from trainer_oracles import Group, deviation, load_padded, make_samples, save_model
from vision_models import VISION_TYPES
from vision_table import TOLERANCE, vision_outcome

from gcore_trainer import (
    OptimizerConfig,
    PackedModel,
    ParallelConfig,
    Sample,
    SFTObjective,
    TorchParallel,
    TorchTrainer,
    UnsupportedModelError,
)
from gcore_trainer.torch.optimizer import gather_full_tensor

TABLE = Path(__file__).parents[2] / "docs/reference/models.md"
_SAMPLES = make_samples([Group(12, [9, 4]), Group(5, [7]), Group(20, [15, 1, 6])], seed=0)
_LONGEST = 35
_HEADER = f"""# Models that packed training computes

Every type of `AutoModelForCausalLM` in transformers, as a tiny random model in float32: `exact` means that
log-probabilities of a packed row (several prompts, some of them shared, of up to {_LONGEST} tokens) are those of
transformers one sample at a time, within {TOLERANCE:g} nats. Sliding windows are {WINDOW} tokens there, shorter than
the samples. In bfloat16, FSDP2 on a mesh of one rank gives the same log-probabilities as no mesh, to the bit, and the
same gradients up to rounding. `refused` models raise an `UnsupportedModelError` when they are loaded; for a few types
there is no tiny model to try.

Written by `python tests/gcore_trainer/model_table.py`, and compared with the code by `test_models.py`.

| model type | packed training |
|---|---|
"""
_VISION_TITLE = "## Models that read images"
_VISION_HEADER = f"""
{_VISION_TITLE}

Every type of `AutoModelForImageTextToText`, as a tiny random model in float32. `exact` means that log-probabilities of
a packed row (prompts with none, one, two and three images, of different sizes where the type allows them, each shared
by three responses; and the same with all images in responses) are those of transformers' own processor and model, one
sample at a time, within {TOLERANCE:g} nats; and that log-probabilities of what the `hf` engine generates to the same
prompts are those of training. SmolVLM's processor needs the package `num2words`.

Images of the other types are not understood: their models are refused when they are loaded, or take text alone where
the first table has them. Among them are LLaVA-NeXT and LLaVA-OneVision (how many tokens an image takes depends on its
size before it is resized, and on whether it is the only one of its prompt), PaliGemma (all tokens of a prompt see each
other), models whose layers attend to images (Idefics, Mllama) or that read with an encoder and write with a decoder
(Florence-2, UDOP, Pix2Struct), and Aya Vision and Command A Vision (transformers does not scale their logits as it
does those of their language models).

| model type | packed training | generation by `hf` |
|---|---|---|
"""


@contextmanager
def world_of_one() -> Generator[None]:
    """Make this process the only rank of a world."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def outcome(model_type: str) -> str:
    """Score a tiny model both ways, in a `world_of_one`.

    Returns:
        the table's text: ``exact``, or why the model is refused or could not be built.

    Raises:
        AssertionError: the model is not refused, and its scores are wrong, or others on a mesh of one.
    """
    if model_type in UNBUILT:
        return f"not tried: {UNBUILT[model_type]}"
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(tiny_config(model_type), Path(folder), seed=0)
        plain = load_padded(path)
        try:
            packed = PackedModel.from_pretrained(path, max_length=_LONGEST)
        except UnsupportedModelError as error:
            return f"refused: {_reason(str(error))}"
        check_mesh_of_one(path, _SAMPLES)
    actual = packed.log_probs([_SAMPLES])[0]
    for sample, log_probs_R in zip(_SAMPLES, actual, strict=True):
        np.testing.assert_allclose(log_probs_R, _alone(plain, sample), rtol=0, atol=TOLERANCE)
    return "exact"


def check_mesh_of_one(path: Path, samples: list[Sample]) -> None:
    """Check that FSDP2 on one rank changes neither log-probabilities nor, but for rounding, gradients in bfloat16."""
    alone, sharded = (
        _bfloat16(path, samples, is_sharded=is_sharded) for is_sharded in (False, True)
    )
    for own, expected in zip(sharded[0], alone[0], strict=True):
        np.testing.assert_array_equal(own, expected)
    assert deviation(sharded[1], alone[1]) < 2**-7


def _bfloat16(
    path: Path, samples: list[Sample], *, is_sharded: bool
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Return log-probabilities before a step, and the gradient of that step."""
    packed = PackedModel.from_pretrained(
        path, max_length=_LONGEST, compute_dtype=torch.bfloat16, sharded=is_sharded
    )
    trainer = TorchTrainer(
        packed,
        optimizer=OptimizerConfig(lr=1e-3, grad_clip=1e9),
        objective=SFTObjective(),
        parallel=TorchParallel.join(ParallelConfig()) if is_sharded else None,
    )
    [log_probs] = trainer.log_probs([samples])
    trainer.train_step([samples])
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in packed.named_parameters().items():
        # Biases of routers are trained by other means: they have no gradient, or zeros.
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients[name] = gather_full_tensor(gradient).float()
    return log_probs, gradients


def table() -> str:
    """Return the whole file."""
    lines = [_HEADER]
    lines += [f"| `{model_type}` | {outcome(model_type)} |\n" for model_type in MODEL_TYPES]
    lines.append(_VISION_HEADER)
    for model_type in VISION_TYPES:
        lines.append(f"| `{model_type}` | {' | '.join(vision_outcome(model_type))} |\n")
    return "".join(lines)


def rows() -> dict[str, str]:
    """Return the outcome of each type of causal LM, as the file has it."""
    text = TABLE.read_text().partition(_VISION_TITLE)[0]
    return dict(re.findall(r"^\| `(\S+)` \| (.*) \|$", text, re.MULTILINE))


def vision_rows() -> dict[str, tuple[str, str]]:
    """Return the outcomes of each type that reads images, as the file has them."""
    text = TABLE.read_text().partition(_VISION_TITLE)[2]
    found = re.findall(r"^\| `(\S+)` \| (.*) \| (.*) \|$", text, re.MULTILINE)
    return {model_type: (packed, generated) for model_type, packed, generated in found}


@torch.no_grad()
def _alone(plain: Any, sample: Sample) -> np.ndarray[Any, Any]:
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]))
    targets = ids[sample.prompt_ids.size :]
    logits_RV = plain(input_ids=ids[None, :-1], use_cache=False).logits[0, -targets.numel() :]
    return logits_RV.log_softmax(-1).gather(1, targets[:, None])[:, 0].numpy()


def _reason(message: str) -> str:
    # What rounding or the sizes of the tiny model decide is left out.
    if message.startswith("scores of "):
        return "scores in a packed row differ from those of transformers"
    message = message.partition(": packed training")[0]
    return re.sub(r", \[[\d, ]+\]", "", message).replace("|", "\\|")


if __name__ == "__main__":
    TABLE.parent.mkdir(exist_ok=True)
    with world_of_one():
        TABLE.write_text(table())
