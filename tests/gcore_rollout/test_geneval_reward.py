"""GenEval's rules on objects at known places, and detectors and CLIP against arithmetic on their own outputs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_pipelines import word_tokenizer
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPModel,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Mask2FormerImageProcessor,
    OwlViTConfig,
    OwlViTForObjectDetection,
    OwlViTImageProcessor,
    OwlViTProcessor,
    SwinConfig,
    YolosConfig,
    YolosForObjectDetection,
    YolosImageProcessor,
)

from gcore_rollout import (
    ImageRewardSettings,
    RewardConfigError,
    build_image_reward,
    evaluate_images,
)
from gcore_rollout.images.detection import ObjectDetector
from gcore_rollout.images.geneval import GenEvalReward, geneval_score, relative_positions

NOISE = np.random.default_rng(0).integers(0, 256, (3, 32, 48, 3)).astype(np.uint8)
PROMPTS = ["a", "b", "c"]

Box = tuple[float, float, float, float]


def at(x: float, y: float, width: float = 10, height: float = 10) -> Box:
    """A box around a place."""
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


@pytest.mark.parametrize(
    ("box", "other", "expected"),
    [
        (at(10, 50), at(50, 50), {"left of"}),
        (at(50, 50), at(10, 50), {"right of"}),
        (at(50, 10), at(50, 50), {"above"}),
        (at(50, 50), at(50, 10), {"below"}),
        (at(10, 10), at(50, 50), {"left of", "above"}),
        (at(50, 48), at(10, 10), {"right of", "below"}),
        # Nearly level: a third of the way is not enough.
        (at(10, 10), at(50, 24), {"left of"}),
        # A tenth of both widths is no offset: here 4 of 3.
        (at(47, 50, 20), at(50, 50, 20), set[str]()),
        (at(44, 50, 20), at(50, 50, 20), set[str]()),
        (at(41, 50, 20), at(50, 50, 20), {"left of"}),
        (at(50, 50), at(50, 50), set[str]()),
    ],
)
def test_positions_are_those_of_centres(box: Box, other: Box, expected: set[str]) -> None:
    assert relative_positions(box, other) == expected


CAT, DOG = {"class": "cat", "count": 1}, {"class": "dog", "count": 1}
LEFT, RIGHT = at(10, 50), at(50, 50)


@pytest.mark.parametrize(
    ("include", "exclude", "objects", "colours", "expected"),
    [
        ([CAT], [], {"cat": [LEFT]}, "", (1.0, True, True)),
        ([CAT], [], {}, "", (0.0, False, False)),
        # One too many is right in GenEval, and 1 - 1 / 1 here.
        ([CAT], [], {"cat": [LEFT, RIGHT]}, "", (0.0, True, False)),
        ([{**CAT, "count": 4}], [], {"cat": [LEFT] * 3}, "", (0.75, False, False)),
        ([{**CAT, "count": 2}], [], {"cat": [LEFT] * 5}, "", (-0.5, True, False)),
        ([CAT, DOG], [], {"cat": [LEFT]}, "", (0.5, False, False)),
        ([CAT], [{**CAT, "count": 2}], {"cat": [LEFT, RIGHT]}, "", (0.0, False, False)),
        ([CAT], [{**DOG, "count": 1}], {"cat": [LEFT], "dog": [RIGHT]}, "", (1.0, False, True)),
        ([{**CAT, "color": "red"}], [], {"cat": [LEFT]}, "red", (1.0, True, True)),
        ([{**CAT, "color": "red"}], [], {"cat": [LEFT]}, "blue", (0.5, False, False)),
        ([{**CAT, "color": "red"}], [], {}, "", (0.0, False, False)),
        # The surest of two has the colour.
        ([{**CAT, "color": "red"}], [], {"cat": [LEFT, RIGHT]}, "red blue", (0.0, True, False)),
        (
            [{**CAT, "count": 2, "color": "red"}],
            [],
            {"cat": [LEFT, RIGHT]},
            "red blue",
            (0.75, False, False),
        ),
        (
            [CAT, {**DOG, "position": ["right of", 0]}],
            [],
            {"cat": [LEFT], "dog": [RIGHT]},
            "",
            (1.0, True, True),
        ),
        # As published, a wrong position has the values 0 and 1.
        (
            [CAT, {**DOG, "position": ["above", 0]}],
            [],
            {"cat": [LEFT], "dog": [RIGHT]},
            "",
            (0.75, False, False),
        ),
        ([CAT, {**DOG, "position": ["above", 0]}], [], {"dog": [RIGHT]}, "", (1 / 3, False, False)),
        ([CAT, {**DOG, "position": ["above", 0]}], [], {"cat": [LEFT]}, "", (1 / 3, False, False)),
        ([{**CAT, "color": None, "position": None}], None, {"cat": [LEFT]}, "", (1.0, True, True)),
    ],
)
def test_the_published_rules(
    include: Any, exclude: Any, objects: Any, colours: str, expected: Any
) -> None:
    row = {"include": include, "exclude": exclude}
    score, is_right, is_exact = geneval_score(
        objects, row, lambda _, boxes: colours.split()[: len(boxes)]
    )
    assert (pytest.approx(score), is_right, is_exact) == expected


@pytest.fixture(scope="module")
def yolos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector of three classes with random weights."""
    path = tmp_path_factory.mktemp("yolos")
    torch.manual_seed(0)
    config = YolosConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=[32, 48],
        patch_size=8,
        num_detection_tokens=20,
        initializer_range=1.0,
        id2label={0: "cat", 1: "mouse", 2: "dog"},
    )
    model = YolosForObjectDetection(config)
    # They start at 0, and would detect the same.
    torch.nn.init.normal_(model.vit.embeddings.detection_tokens)
    torch.nn.init.normal_(model.vit.embeddings.position_embeddings)
    model.save_pretrained(path)
    YolosImageProcessor(size={"height": 32, "width": 48}, do_pad=False).save_pretrained(path)
    return path


def corners(boxes: torch.Tensor) -> torch.Tensor:
    """Boxes [N, 4] of centre and size, shares of the image, in pixels."""
    x, y, width, height = boxes.unbind(-1)
    sides = torch.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], -1)
    return sides * torch.tensor([48, 32, 48, 32])


@torch.no_grad()
def test_objects_are_those_of_the_detector(yolos: Path) -> None:
    model: Any = YolosForObjectDetection.from_pretrained(yolos)
    names = ("cat", "computer mouse", "dog")
    reward = GenEvalReward(yolos, thresholds=(0.4, 0.7))
    rows = [
        {"include": [{"class": name, "count": 1}], "tag": tag}
        for name, tag in zip(names, "xx", strict=False)
    ]
    rows.append({"include": [{"class": "dog", "count": 1}], "tag": "counting"})
    found = reward.detect(NOISE, rows)
    processor = YolosImageProcessor.from_pretrained(yolos)
    for image, row, objects in zip(NOISE, rows, found, strict=True):
        seen = model(**processor([image], return_tensors="pt"))
        probabilities = seen.logits[0].softmax(-1)[:, :3]
        boxes, least = corners(seen.pred_boxes[0]), 0.7 if row["tag"] == "counting" else 0.4
        for place, name in enumerate(names):
            scores = {
                i: p[place]
                for i, p in enumerate(probabilities.tolist())
                if p[place] > least and p[place] == max(p)
            }
            order = sorted(scores, key=lambda i: -scores[i])
            assert len(objects.get(name, [])) == len(order)
            for box, i in zip(objects.get(name, []), order, strict=True):
                assert box == pytest.approx(boxes[i].tolist(), abs=1e-3)
    assert len({len(own) for objects in found for own in objects.values()}) > 1


async def test_scores_of_a_detector(yolos: Path) -> None:
    detector = GenEvalReward(yolos, thresholds=(0.4, 0.4))
    objects = detector.detect(NOISE, [{"include": [CAT]}] * 3)
    counts = [len(own.get("cat", [])) for own in objects]
    assert len(set(counts)) > 1
    rows = [{"include": [{"class": "cat", "count": 2}]}] * 3
    settings = ImageRewardSettings(path=str(yolos), thresholds=(0.4, 0.4))
    found = await evaluate_images(
        build_image_reward("geneval", settings, setting="x.kind"), NOISE, PROMPTS, rows
    )
    assert [one.score for one in found] == pytest.approx(
        [1 - abs(2 - count) / 2 for count in counts]
    )
    assert [one.parts["strict_accuracy"] for one in found] == [
        float(count == 2) for count in counts
    ]
    assert [one.parts["accuracy"] for one in found] == [float(count >= 2) for count in counts]


@torch.no_grad()
def test_colours_are_named_by_clip(yolos: Path, clip: Path) -> None:
    """As by transformers' own CLIP on the boxes' pixels and GenEval's texts."""
    colours = [
        "red",
        "orange",
        "yellow",
        "green",
        "blue",
        "purple",
        "pink",
        "brown",
        "black",
        "white",
    ]
    model: Any = CLIPModel.from_pretrained(clip)
    processor, tokenizer = (
        CLIPImageProcessor.from_pretrained(clip),
        AutoTokenizer.from_pretrained(clip),
    )
    boxes = [(3.2, 4.0, 20.7, 30.0), (25.0, 2.0, 40.0, 20.0), (-5.0, 0.0, 12.0, 9.0)]
    crops = [Image.fromarray(NOISE[0]).crop(box) for box in boxes]
    seen = model.get_image_features(**processor(crops, return_tensors="pt")).pooler_output
    classifiers: list[torch.Tensor] = []
    for colour in colours:
        texts = [
            f"a photo of a {colour} cat",
            f"a photo of a {colour}-colored cat",
            f"a photo of a {colour} object",
        ]
        tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        read = model.get_text_features(**tokens).pooler_output
        mean = (read / read.norm(dim=1, keepdim=True)).mean(0)
        classifiers.append(mean / mean.norm())
    similarities = seen / seen.norm(dim=1, keepdim=True) @ torch.stack(classifiers).T
    reward: Any = GenEvalReward(yolos, clip=clip)
    names = reward._name_colours(NOISE[0], {}, "cat", tuple(boxes))
    assert len(names) == len(boxes)
    for similarity, name in zip(similarities, names, strict=True):
        # A random model's colours are nearly alike.
        assert similarity[colours.index(name)] >= similarity.max() - 1e-5
    # A box without an area is a pixel.
    assert len(reward._name_colours(NOISE[0], {}, "cat", ((4.0, 4.0, 4.0, 4.0),))) == 1


@torch.no_grad()
def test_objects_with_masks(clip: Path, tmp_path: Path) -> None:
    """Of GenEval's own detector: boxes are around masks, and colours of their pixels on grey."""
    torch.manual_seed(1)
    backbone: dict[str, Any] = {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 8,
        "depths": [1, 1, 1, 1],
        "num_heads": [1, 1, 1, 1],
        "window_size": 4,
        "out_features": ["stage1", "stage2", "stage3", "stage4"],
    }
    config = Mask2FormerConfig(
        backbone_config=SwinConfig(**backbone),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=16,
        num_queries=10,
        init_std=0.5,
        init_xavier_std=3.0,
        id2label={0: "cat", 1: "dog"},
    )
    Mask2FormerForUniversalSegmentation(config).save_pretrained(tmp_path)
    sides = {"height": 32, "width": 48}
    Mask2FormerImageProcessor(size=sides, ignore_index=255).save_pretrained(tmp_path)
    model: Any = Mask2FormerForUniversalSegmentation.from_pretrained(tmp_path)
    processor: Any = Mask2FormerImageProcessor.from_pretrained(tmp_path)
    found = ObjectDetector(tmp_path)(list(NOISE), threshold=0.3)
    for image, objects in zip(NOISE, found, strict=True):
        seen = model(**processor([image], return_tensors="pt"))
        classes = seen.class_queries_logits[0].softmax(-1)[:, :2]
        shares = torch.nn.functional.interpolate(
            seen.masks_queries_logits, (384, 384), mode="bilinear"
        )[0].sigmoid()
        inside = shares > 0.5
        quality = (shares * inside).sum((1, 2)) / (inside.sum((1, 2)) + 1e-6)
        best = (classes * quality[:, None]).flatten()[classes.flatten().topk(10).indices]
        expected = sorted((score for score in best.tolist() if score > 0.3), reverse=True)
        assert [one.score for one in objects] == pytest.approx(expected, abs=1e-4)
        for one in objects:
            assert one.mask is not None
            left, top, right, bottom = map(int, one.box)
            assert one.mask.shape == (32, 48)
            assert one.mask[top:bottom, left:right].sum() == one.mask.sum()
            edges = one.mask[top], one.mask[bottom - 1], one.mask[:, left], one.mask[:, right - 1]
            assert all(edge.any() for edge in edges)
    assert sum(map(len, found)) > 3
    reward: Any = GenEvalReward(tmp_path, clip=clip)
    box, mask = next(
        (one.box, one.mask) for one in found[0] if one.mask is not None and not one.mask.all()
    )
    grey = np.where(mask[..., None], NOISE[0], 0x99).astype(np.uint8)
    assert reward._name_colours(NOISE[0], {box: mask}, "cat", (box,)) == reward._name_colours(
        grey, {}, "cat", (box,)
    )


@torch.no_grad()
def test_zero_shot_detectors_are_given_the_names(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(tmp_path / "words")
    size: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "initializer_range": 0.5,
    }
    torch.manual_seed(0)
    config = OwlViTConfig(
        text_config={**size, "vocab_size": len(tokenizer), "max_position_embeddings": 8},
        vision_config={**size, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    model = OwlViTForObjectDetection(config).eval()
    model.save_pretrained(tmp_path / "owl")
    processor: Any = OwlViTProcessor(
        OwlViTImageProcessor(size={"height": 32, "width": 32}), tokenizer
    )
    processor.save_pretrained(tmp_path / "owl")
    reward = GenEvalReward(tmp_path / "owl", thresholds=(0.5, 0.5))
    rows = [
        {"include": [CAT, DOG]},
        {"include": [CAT], "exclude": [DOG]},
        {"include": [{"class": "fox", "count": 1}]},
    ]
    reward.check_prompts(PROMPTS, rows)
    found = reward.detect(NOISE, rows)
    for image, names, objects in zip(
        NOISE, (["cat", "dog"], ["cat", "dog"], ["fox"]), found, strict=True
    ):
        seen: Any = model(**processor(images=[image], text=[names], return_tensors="pt"))
        scores = seen.logits[0].sigmoid()
        for place, name in enumerate(names):
            order = [
                i
                for i, own in enumerate(scores)
                if own[place] > 0.5 and seen.logits[0, i].argmax() == place
            ]
            order.sort(key=lambda i: -float(scores[i, place]))
            expected = corners(seen.pred_boxes[0])[order][:16]
            assert np.array(objects.get(name, [])).reshape(-1, 4) == pytest.approx(
                expected.numpy(), abs=1e-3
            )
    assert sum(len(own) for objects in found for own in objects.values()) > 3


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {},
            "the row of 'a' has no include; expected include: a list of class, count of 1 or more",
        ),
        ({"include": [{"class": "cat"}]}, "has the clause {'class': 'cat'}; expected include"),
        ({"include": [{**CAT, "count": 0}]}, "expected include"),
        ({"include": [{**CAT, "color": "teal"}]}, "expected include: .*color .red, orange"),
        ({"include": [{**CAT, "position": ["left of", 0]}]}, "number of an earlier clause"),
        ({"include": [CAT, {**CAT, "position": ["near", 0]}]}, "left of | right of"),
        ({"include": ["cat"]}, "has the clause 'cat'"),
        (
            {"include": [{**CAT, "class": "unicorn"}]},
            "the class 'unicorn'; expected one that the detector knows: cat, c",
        ),
        (
            {"include": [{**CAT, "color": "red"}]},
            "has a color; expected a CLIP model in reward.head, which names colours",
        ),
    ],
)
def test_rows_that_are_not_genevals(yolos: Path, row: Any, said: str) -> None:
    with pytest.raises(RewardConfigError, match=said):
        GenEvalReward(yolos).check_prompts(["a"], [row])


def test_wrong_folders(clip: Path, yolos: Path, tmp_path: Path) -> None:
    for folder, head, said in (
        (tmp_path, "", "expected a Hugging Face folder of an object detector"),
        (clip, "", "path is "),
        (yolos, tmp_path, "expected a Hugging Face folder of a CLIP model"),
        (
            "",
            "",
            "reward.path is not set; expected a local folder of an object detector for geneval",
        ),
    ):
        with pytest.raises(RewardConfigError, match=said):
            build_image_reward(
                "geneval",
                ImageRewardSettings(path=str(folder), head=str(head)),
                setting="reward.kind",
            )
