"""Compiled layers of vision-language models: log-probs and gradients of the layers themselves."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_vision_model import IMAGE, VISION_END, VISION_START, Reference, noise, save_vision_model

from gcore_trainer import Images, PackedModel, Sample, compile_layers

# Dynamo looks at the gradient of every tensor, also of those that have none.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
WIDE = noise(56, 84, 0)


def make_samples(reference: Reference, text: int) -> list[Sample]:
    """Two responses to a prompt with an image, and one to text."""
    prompt = [text, text + 1, VISION_START, *[IMAGE] * 6, VISION_END, text + 2]
    inputs = reference.inputs(prompt, [WIDE])
    images = Images(
        pixel_values=inputs["pixel_values"].numpy(), grid_thw=inputs["image_grid_thw"].numpy()
    )
    seeing = [
        Sample(prompt_ids=np.array(prompt), response_ids=np.array(r), images=images)
        for r in ([5, 6, 7], [8, 9])
    ]
    return [
        *seeing,
        Sample(prompt_ids=np.array([text, 3, 4]), response_ids=np.array([11, 12, 13, 14])),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "gradient_checkpointing"), [("qwen2_vl", True), ("qwen2_5_vl", False)]
)
def test_compiled_layers_give_the_same_results(
    kind: str, gradient_checkpointing: bool, tmp_path: Path
) -> None:
    torch.compiler.reset()
    folder = save_vision_model(tmp_path / "model", kind)
    reference = Reference.load(folder)
    plain, other = (
        PackedModel.from_pretrained(folder, gradient_checkpointing=gradient_checkpointing)
        for _ in range(2)
    )
    compile_layers(other, backend="eager")
    for text in (40, 45):
        samples = make_samples(reference, text)
        gradients: list[dict[str, torch.Tensor]] = []
        for packed in (plain, other):
            packed.model.zero_grad()
            scores = packed.score(samples)
            (scores.log_probs * torch.linspace(0.5, 1.5, len(scores.log_probs))).sum().backward()
            named = packed.model.named_parameters()
            gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
        torch.testing.assert_close(
            other.log_probs([samples]), plain.log_probs([samples]), rtol=1e-5, atol=1e-5
        )
        assert any("visual" in name for name in gradients[0])
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)
