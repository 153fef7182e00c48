"""Samples with images: packed, scored and learned from as transformers does one alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rank_pool import RankServer
from safetensors.torch import load_file
from tiny_vision_model import IMAGE, VISION_END, VISION_START, Reference, noise, save_vision_model
from trainer_oracles import SIZES, save_model
from transformers import AutoConfig, Qwen2Config

from gcore_trainer import (
    BatchError,
    Images,
    LoRAConfig,
    OptimizerConfig,
    PackedModel,
    PackedValueModel,
    ParallelConfig,
    PolicyLossConfig,
    PolicyObjective,
    Sample,
    TorchTrainer,
    UnsupportedModelError,
)
from gcore_trainer.context_parallel.groups import ContextParallel
from gcore_trainer.megatron.architecture import Architecture
from gcore_trainer.packing.layout import pack

TOLERANCE = 1e-4
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.0)
WIDE, TALL, SMALL = noise(56, 84, 0), noise(90, 60, 1), noise(30, 30, 2)
GRIDS = {WIDE: (4, 6), TALL: (6, 4), SMALL: (2, 2)}
Case = tuple[Sample, tuple[bytes, ...]]


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision") / "model", request.param)


@pytest.fixture(scope="module")
def qwen2_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision") / "tied", tie=True)


def make_case(
    reference: Reference, images: Sequence[bytes], response: Sequence[int], *, text: int = 40
) -> Case:
    """A prompt with each image between words, and a response."""
    prompt = [text, text + 1]
    for i, image in enumerate(images):
        height, width = GRIDS[image]
        prompt += [VISION_START, *[IMAGE] * (height * width // 4), VISION_END, text + 2 + i]
    seen = None
    if images:
        inputs = reference.inputs(prompt, images)
        seen = Images(
            pixel_values=inputs["pixel_values"].numpy(), grid_thw=inputs["image_grid_thw"].numpy()
        )
    return Sample(prompt_ids=np.array(prompt), response_ids=np.array(response), images=seen), tuple(
        images
    )


def make_cases(reference: Reference) -> list[Case]:
    """Text alone, one image, two, the same tokens with another image, and a shared prompt, in one micro-batch."""
    wide = make_case(reference, [WIDE], [50, 51, 52, 53])
    return [
        make_case(reference, [], [60, 61, 62]),
        wide,
        make_case(reference, [TALL, SMALL], [70, 71]),
        make_case(reference, [TALL], [50, 51, 52]),
        (replace(wide[0], response_ids=np.array([80, 81, 82])), wide[1]),
        make_case(reference, [SMALL], [90]),
    ]


def expected_log_probs(reference: Reference, case: Case) -> torch.Tensor:
    sample, images = case
    return reference.log_probs(sample.prompt_ids.tolist(), images, sample.response_ids.tolist())


@pytest.mark.parametrize("share_prefix", [True, False])
def test_log_probs_are_those_of_each_sample_alone(folder: Path, share_prefix: bool) -> None:
    reference = Reference.load(folder)
    cases = make_cases(reference)
    packed = PackedModel.from_pretrained(folder, share_prefix=share_prefix)
    [found] = packed.log_probs([[sample for sample, _ in cases]])
    with torch.no_grad():
        for log_probs, case in zip(found, cases, strict=True):
            np.testing.assert_allclose(
                log_probs, expected_log_probs(reference, case), atol=TOLERANCE, rtol=0
            )


def test_equal_prompts_are_computed_once_only_with_equal_images(folder: Path) -> None:
    reference = Reference.load(folder)
    wide, tall = make_case(reference, [WIDE], [50]), make_case(reference, [TALL], [50])
    assert wide[0].prompt_ids.tolist() == tall[0].prompt_ids.tolist()
    same = replace(wide[0], images=Images(**vars(wide[0].images)))
    length = wide[0].num_inputs
    assert pack([wide[0], same]).input_ids.size == length
    assert pack([wide[0], tall[0]]).input_ids.size == 2 * length


def test_branches_see_the_images_that_they_follow(folder: Path) -> None:
    """A token in the middle, the prompt and nothing are followed by another branch each."""
    reference = Reference.load(folder)
    response = [50, 51, 52, 53, 60, 61, 70, 71, 72, 80, 81]
    sample, images = make_case(reference, [WIDE], response)
    forks = np.array([[4, 1], [6, -1], [9, -2]])
    tree = replace(sample, forks=forks, response_mask=np.arange(11) != 9)
    [[found]] = PackedModel.from_pretrained(folder).log_probs([[tree]])
    with torch.no_grad():
        for path in ([0, 1, 2, 3], [0, 1, 4, 5], [6, 7, 8]):
            branch = replace(sample, response_ids=sample.response_ids[path])
            expected = expected_log_probs(reference, (branch, images))
            np.testing.assert_allclose(found[path], expected, atol=TOLERANCE, rtol=0)
        expected = reference.log_probs([80], (), [81])
        np.testing.assert_allclose(found[10:], expected, atol=TOLERANCE, rtol=0)


def span_of(image: bytes) -> list[int]:
    """An image's tokens, between their marks."""
    height, width = GRIDS[image]
    return [VISION_START, *[IMAGE] * (height * width // 4), VISION_END]


def make_tree(reference: Reference, first: bytes, *later: bytes) -> Sample:
    """A prompt with an image, and a response of text whose branches each show another and go on."""
    prompt = [40, *span_of(first), 41]
    response = [50, IMAGE, 51]
    starts = [2]
    forks: list[tuple[int, int]] = []
    for i, image in enumerate(later):
        if i:
            forks.append((len(response), 2))
        starts.append(len(prompt) + len(response) + 1)
        response += [*span_of(image), 60 + i, 70, 71]
    inputs = reference.inputs(prompt, [first, *later])
    images = Images(
        pixel_values=inputs["pixel_values"].numpy(),
        grid_thw=inputs["image_grid_thw"].numpy(),
        starts=np.array(starts),
    )
    forks_F2 = np.array(forks, np.int64).reshape(-1, 2)
    return Sample(
        prompt_ids=np.array(prompt), response_ids=np.array(response), images=images, forks=forks_F2
    )


def test_images_of_a_response_and_its_branches_are_seen_where_they_stand(folder: Path) -> None:
    """Next to a sample with the same prompt, in rows that share it; the image token of the policy is text."""
    reference = Reference.load(folder)
    samples = [make_tree(reference, WIDE, TALL, SMALL, WIDE), make_tree(reference, WIDE, SMALL)]
    packed = PackedModel.from_pretrained(folder)
    found = packed.log_probs([samples])[0]
    for sample, log_probs, later in zip(
        samples, found, [[TALL, SMALL, WIDE], [SMALL]], strict=True
    ):
        stop = 3
        for image in later:
            start = stop + len(span_of(image))
            context = [
                *sample.prompt_ids,
                *sample.response_ids[:3],
                *sample.response_ids[stop:start],
            ]
            stop = start + 3
            expected = reference.log_probs_of_text(
                [int(token) for token in context],
                [WIDE, image],
                sample.response_ids[start:stop].tolist(),
                text=[sample.prompt_ids.size + 1],
            )
            np.testing.assert_allclose(log_probs[start:stop], expected, atol=TOLERANCE, rtol=0)
    length = pack(samples).input_ids.size
    assert length == sum(s.num_inputs for s in samples) - samples[0].prompt_ids.size


def test_images_that_do_not_fit_a_response_are_refused(folder: Path) -> None:
    reference = Reference.load(folder)
    tree = make_tree(reference, WIDE, SMALL)
    assert tree.images is not None
    packed = PackedModel.from_pretrained(folder)
    moved = replace(tree.images, starts=np.array([2, 3]))
    with pytest.raises(BatchError, match=r"expected one run for each image, of as many tokens"):
        packed.log_probs([[replace(tree, images=moved)]])
    with pytest.raises(BatchError, match=r"starts is \[2, 2\]; expected 2 ascending numbers"):
        replace(tree.images, starts=np.array([2, 2]))
    cut = make_tree(reference, WIDE, TALL)
    cut = replace(cut, forks=np.array([[12, 5]]))
    with pytest.raises(BatchError, match="an image is cut at response token 6"):
        packed.log_probs([[cut]])


def test_gradients_are_those_of_each_sample_alone(folder: Path) -> None:
    reference = Reference.load(folder)
    cases = make_cases(reference)
    packed = PackedModel.from_pretrained(folder, gradient_checkpointing=True)
    weights = torch.linspace(-1, 1, sum(s.response_ids.size for s, _ in cases))
    torch.autograd.backward((packed.score([s for s, _ in cases]).log_probs * weights).sum())
    expected = torch.cat([expected_log_probs(reference, case) for case in cases])
    torch.autograd.backward((expected * weights).sum())
    found = dict(packed.model.named_parameters())
    for name, parameter in reference.model.named_parameters():
        assert parameter.grad.abs().max() > 0
        difference = (found[name].grad - parameter.grad).abs().max()
        assert difference < TOLERANCE * max(1.0, parameter.grad.abs().max().item()), name


def test_an_image_token_that_the_policy_wrote_is_text(folder: Path) -> None:
    reference = Reference.load(folder)
    case = make_case(reference, [WIDE], [50, IMAGE, 52, IMAGE, IMAGE, 55])
    [[found]] = PackedModel.from_pretrained(folder).log_probs([[case[0]]])
    expected = reference.log_probs_of_text(
        case[0].prompt_ids.tolist(), case[1], case[0].response_ids.tolist()
    )
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


def make_trainer(packed: PackedModel) -> TorchTrainer:
    return TorchTrainer(packed, optimizer=OPTIMIZER, objective=PolicyObjective(PolicyLossConfig()))


def with_advantages(samples: Sequence[Sample]) -> list[Sample]:
    def ones(sample: Sample) -> NDArray[np.float32]:
        return np.ones(sample.response_ids.shape, np.float32)

    return [replace(s, advantages=ones(s) * (-1) ** i) for i, s in enumerate(samples)]


def test_a_step_moves_the_tower_and_weights_go_out_under_the_names_of_the_folder(
    qwen2_vl: Path, tmp_path: Path
) -> None:
    reference = Reference.load(qwen2_vl)
    trainer = make_trainer(PackedModel.from_pretrained(qwen2_vl))
    samples = with_advantages([sample for sample, _ in make_cases(reference)])
    before = load_file(qwen2_vl / "model.safetensors")
    trainer.train_step([samples])
    after = {name: tensor.clone() for name, tensor in trainer.export_weights()}
    assert after.keys() == before.keys()
    assert not any(torch.equal(after[n], before[n]) for n in after if n.startswith("visual."))
    trainer.save_pretrained(tmp_path / "export")
    saved = load_file(tmp_path / "export" / "model.safetensors")
    assert saved.keys() == before.keys()
    assert all(torch.equal(after[name], saved[name]) for name in saved)


def test_a_micro_batch_without_images_leaves_the_tower_as_it_is(qwen2_vl: Path) -> None:
    reference = Reference.load(qwen2_vl)
    trainer = make_trainer(PackedModel.from_pretrained(qwen2_vl))
    before = load_file(qwen2_vl / "model.safetensors")
    metrics = trainer.train_step([with_advantages([make_case(reference, [], [60, 61, 62])[0]])])
    assert metrics["actor/grad_norm"] > 0
    after = dict(trainer.export_weights())
    assert all(torch.equal(after[n], before[n]) for n in after if n.startswith("visual."))


def test_adapters_are_merged_under_the_names_of_the_folder(qwen2_vl: Path, tmp_path: Path) -> None:
    reference = Reference.load(qwen2_vl)
    packed = PackedModel.from_pretrained(qwen2_vl, lora=LoRAConfig(rank=2))
    trainer = make_trainer(packed)
    cases = make_cases(reference)
    samples = [sample for sample, _ in cases]
    trainer.train_step([with_advantages(samples)])
    assert dict(trainer.export_weights()).keys() == load_file(qwen2_vl / "model.safetensors").keys()
    trainer.save_pretrained(tmp_path)
    merged = Reference.load(tmp_path)
    [found] = trainer.log_probs([samples])
    with torch.no_grad():
        for log_probs, case in zip(found, cases, strict=True):
            np.testing.assert_allclose(
                log_probs, expected_log_probs(merged, case), atol=TOLERANCE, rtol=0
            )


@pytest.mark.slow
def test_two_ranks_of_which_one_has_no_images_learn_what_one_process_does(
    rank_server: RankServer, qwen2_vl: Path
) -> None:
    reference = Reference.load(qwen2_vl)
    samples = with_advantages([sample for sample, _ in make_cases(reference)])
    seeing = [s for s in samples if s.images is not None]
    blind = [s for s in samples if s.images is None]
    alone = make_trainer(PackedModel.from_pretrained(qwen2_vl))
    expected = [alone.train_step([samples]) for _ in range(2)]
    steps = [[[seeing], [blind]], [[seeing[:2], seeing[2:]], [blind]]]
    objective = PolicyObjective(PolicyLossConfig())
    arguments = (str(qwen2_vl), objective, OPTIMIZER, ParallelConfig(), steps, {})
    for metrics, weights in rank_server.shared(2).run("train", *arguments, size=2):
        for found, wanted in zip(metrics, expected, strict=True):
            assert found["actor/grad_norm"] == pytest.approx(
                wanted["actor/grad_norm"], rel=TOLERANCE
            )
        for name, tensor in alone.export_weights():
            torch.testing.assert_close(weights[name], tensor, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    "images",
    [
        {"pixel_values": np.zeros((23, 1176), np.float32), "grid_thw": np.array([[1, 4, 6]])},
        {"pixel_values": np.zeros((0, 1176), np.float32), "grid_thw": np.zeros((0, 3), np.int64)},
        {"pixel_values": np.zeros((24, 1176), np.float32), "grid_thw": np.array([1, 4, 6])},
    ],
)
def test_patches_that_are_not_those_of_the_grid_are_refused(images: dict[str, Any]) -> None:
    with pytest.raises(BatchError, match="has shape"):
        Images(**images)


def test_images_that_do_not_fit_the_prompt_are_refused(qwen2_vl: Path) -> None:
    reference = Reference.load(qwen2_vl)
    packed = PackedModel.from_pretrained(qwen2_vl)
    sample, _ = make_case(reference, [WIDE], [50])
    side_by_side = np.array([40, *[IMAGE] * 12, 41])
    both = make_case(reference, [WIDE, TALL], [50])[0].images
    for bad in (
        replace(sample, prompt_ids=sample.prompt_ids[:-4]),
        replace(sample, prompt_ids=np.array([40, 41])),
        replace(sample, prompt_ids=side_by_side, images=both),
    ):
        with pytest.raises(BatchError, match="one run for each image"):
            packed.score([bad])


def test_what_sees_no_images_refuses_them(qwen2_vl: Path, tmp_path: Path) -> None:
    sample, _ = make_case(Reference.load(qwen2_vl), [WIDE], [50])
    blind = PackedModel.from_pretrained(
        save_model(Qwen2Config(**SIZES), tmp_path / "blind", seed=0)
    )
    with pytest.raises(BatchError, match="sees none"):
        blind.score([sample])
    with pytest.raises(
        UnsupportedModelError, match="expected one without images for PackedValueModel"
    ):
        PackedValueModel.from_pretrained(qwen2_vl)
    with pytest.raises(UnsupportedModelError, match="model_type is 'qwen2_vl'"):
        Architecture(AutoConfig.from_pretrained(qwen2_vl))


def test_tokens_of_a_model_that_sees_are_not_divided(qwen2_vl: Path) -> None:
    packed = PackedModel.from_pretrained(qwen2_vl)
    with pytest.raises(
        UnsupportedModelError, match="expected context and sequence parallel sizes of 1"
    ):
        packed.divide_tokens(ContextParallel(ring_size=2))
