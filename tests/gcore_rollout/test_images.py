"""Requests with images: what the engines say against transformers' own model, alone with each prompt."""

import asyncio
import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import PIL.Image
import pytest
from engine_oracles import (
    VLLM_IMPORT_WARNINGS,
    TinyModel,
    collect,
    engine_args,
    in_parts,
    until_sampled,
)
from safetensors.torch import load_file
from tiny_vision_model import IMAGE, VISION_END, VISION_START, Reference, noise, save_vision_model

from gcore_rollout import (
    Completion,
    Engine,
    EngineModelError,
    Group,
    HFEngine,
    PromptImages,
    Request,
    RequestError,
    RolloutError,
    SamplingParams,
    VisionProcessor,
    VLLMEngine,
    decode_image,
)
from gcore_rollout.groups import share_prompt

pytestmark = VLLM_IMPORT_WARNINGS

TOLERANCE = 1e-4
WIDE, TALL, SMALL = noise(56, 84, 0), noise(90, 60, 1), noise(30, 30, 2)
KINDS = ["hf", pytest.param("vllm", marks=pytest.mark.slow)]


def make_engine(kind: str, path: Path, **options: Any) -> Engine:
    if kind == "hf":
        return HFEngine.from_pretrained(path, **options)
    engine_args()
    return VLLMEngine.from_pretrained(path, kv_cache_memory_bytes=64 << 20, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision")
    return {
        "old": save_vision_model(root / "old"),
        "new": save_vision_model(root / "new", seed=1),
        "windows": save_vision_model(root / "windows", "qwen2_5_vl", tie=True),
    }


@pytest.fixture(scope="module")
def processor(folders: dict[str, Path]) -> VisionProcessor:
    return VisionProcessor.from_pretrained(folders["old"])


@pytest.fixture(scope="module", params=KINDS)
def engine(folders: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Engine]:
    """With the old weights."""
    engine = make_engine(request.param, folders["old"], max_num_seqs=6)
    yield engine
    asyncio.run(engine.close())


def make_request(
    processor: VisionProcessor,
    name: str,
    images: Sequence[bytes],
    *,
    n: int = 1,
    greedy: bool = False,
) -> Request:
    tokens = [40, 41]
    for i in range(len(images)):
        tokens += [VISION_START, IMAGE, VISION_END, 42 + i]
    return Request(
        request_id=name,
        prompt_token_ids=processor.expand(tokens, images),
        sampling=SamplingParams(max_tokens=12, temperature=0.0 if greedy else 1.0),
        n=n,
        images=tuple(images),
    )


def make_requests(processor: VisionProcessor, **options: Any) -> list[Request]:
    return [
        make_request(processor, "none", [], **options),
        make_request(processor, "wide", [WIDE], **options),
        # The same tokens as with the wide one.
        make_request(processor, "tall", [TALL], **options),
        make_request(processor, "two", [TALL, SMALL], **options),
    ]


def assert_log_probs(reference: Reference, request: Request, completion: Completion) -> None:
    tokens = completion.token_ids.tolist()
    log_probs = reference.log_probs_of_text if request.images else reference.log_probs
    expected = log_probs(request.prompt_token_ids, request.images, tokens).detach().numpy()
    np.testing.assert_allclose(completion.log_probs, expected, atol=TOLERANCE, rtol=0)


async def test_log_probs_and_greedy_tokens_are_those_of_transformers(
    folders: dict[str, Path], processor: VisionProcessor, engine: Engine
) -> None:
    await check_log_probs_and_greedy_tokens(engine, Reference.load(folders["old"]), processor)


async def test_image_tokens_of_earlier_turns_are_text(
    folders: dict[str, Path], processor: VisionProcessor, engine: Engine
) -> None:
    """The prompt of a second turn: an image, a turn with two image tokens, and another image."""
    first = processor.expand([40, VISION_START, IMAGE, VISION_END], [WIDE])
    turn = (50, IMAGE, 51, IMAGE)
    second = processor.expand([VISION_START, IMAGE, VISION_END, 41], [SMALL])
    starts = (2, len(first) + len(turn) + 1)
    request = Request(
        request_id="later",
        prompt_token_ids=(*first, *turn, *second),
        sampling=SamplingParams(max_tokens=8),
        n=2,
        images=(WIDE, SMALL),
        image_starts=starts,
    )
    reference = Reference.load(folders["old"])
    text = [len(first) + 1, len(first) + 3]
    for completion in (await collect(engine, request)).values():
        tokens = completion.token_ids.tolist()
        expected = reference.log_probs_of_text(
            request.prompt_token_ids, request.images, tokens, text=text
        )
        np.testing.assert_allclose(completion.log_probs, expected, atol=TOLERANCE, rtol=0)
    with pytest.raises(
        RequestError, match=r"images of \[6, 1\] tokens and places of \[6, 1, 1, 1\]"
    ):
        await collect(engine, replace(request, request_id="runs", image_starts=None))


def test_pixels_are_counted_before_they_are_decoded(processor: VisionProcessor) -> None:
    file = io.BytesIO()
    PIL.Image.new("L", (100, 90)).save(file, "PNG")
    # Its pixels are missing.
    image = file.getvalue()[:-30]
    with pytest.raises(RequestError, match="an image has 9000 pixels; expected at most 8999"):
        processor.check_image(image, max_pixels=8999)
    with pytest.raises(RequestError, match="does not decode"):
        processor.check_image(image, max_pixels=9000)
    processor.check_image(WIDE, max_pixels=56 * 84)


def test_an_orientation_that_is_no_number_is_none(processor: VisionProcessor) -> None:
    file = io.BytesIO()
    picture = PIL.Image.new("RGB", (56, 84))
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save(file, "JPEG", exif=exif)
    sideways = file.getvalue()
    # The tag's type becomes that of a text.
    entry = b"\x01\x12\x00\x03\x00\x00\x00\x01\x00\x06"
    assert entry in sideways
    damaged = sideways.replace(entry, b"\x01\x12\x00\x02\x00\x00\x00\x01\x00\x06")
    processor.check_image(damaged, max_pixels=56 * 84)
    assert decode_image(damaged).shape == (84, 56, 3)
    assert decode_image(sideways).shape == (56, 84, 3)


def make_episode(prompt: Sequence[int], starts: tuple[int, ...]) -> Completion:
    return Completion(
        request_id="0/0",
        index=0,
        token_ids=np.array([50, 51]),
        log_probs=np.zeros(2, np.float32),
        weight_versions=np.zeros(2, np.int32),
        finish_reason="stop",
        prompt_ids=np.array(prompt),
        images=PromptImages(model="model", sources=(b"file",) * len(starts), starts=starts),
    )


def test_episodes_share_no_part_of_an_image() -> None:
    """Their images have 2 and 3 tokens, and others that are equal as tokens."""
    start = [40, VISION_START]
    for other, size in ([IMAGE] * 3, 2), ([IMAGE] * 2, 6):
        group = Group(prompt_index=0, prompt_ids=np.array([1]))
        for image in ([IMAGE] * 2, other):
            prompt = [*start, *image, VISION_END, 41]
            group.responses.append(share_prompt(group, make_episode(prompt, (2,))))
        assert group.prompt_ids.size == size
        for response in group.responses:
            assert response.images is not None
            assert response.images.starts is not None
            tokens = [*group.prompt_ids, *response.token_ids]
            assert tokens[response.images.starts[0]] == IMAGE
    restored = Group.from_state(group.state())
    assert [r.images for r in restored.responses] == [r.images for r in group.responses]
    assert restored.has_images


@pytest.mark.parametrize("kind", KINDS)
async def test_a_tower_with_windows_and_a_tied_head(
    folders: dict[str, Path], processor: VisionProcessor, kind: str
) -> None:
    engine = make_engine(kind, folders["windows"])
    await check_log_probs_and_greedy_tokens(engine, Reference.load(folders["windows"]), processor)
    await engine.close()


async def check_log_probs_and_greedy_tokens(
    engine: Engine, reference: Reference, processor: VisionProcessor
) -> None:
    sampled = {r.request_id: r for r in make_requests(processor, n=3)}
    found = await collect(engine, *sampled.values())
    for (name, _), completion in found.items():
        assert_log_probs(reference, sampled[name], completion)
    first = {name: found[name, 0].token_ids.tolist() for name in sampled}
    assert first["wide"] != first["tall"]
    greedy = make_requests(processor, greedy=True)
    for (name, _), completion in (await collect(engine, *greedy)).items():
        [request] = [r for r in greedy if r.request_id == name]
        tokens = completion.token_ids.tolist()
        expected = reference.greedy(
            request.prompt_token_ids, request.images, request.sampling.max_tokens
        )
        # transformers' generate pads behind the end, and sees an image in an image token that it has written.
        clean = tokens[: tokens.index(IMAGE)] if IMAGE in tokens else tokens
        assert clean == expected[: len(clean)]
        assert_log_probs(reference, request, completion)


async def test_new_weights_move_the_tower_and_nothing_seen_before_is_used(
    folders: dict[str, Path], processor: VisionProcessor, engine: Engine
) -> None:
    old, new = Reference.load(folders["old"]), Reference.load(folders["new"])
    request = make_request(processor, "wide", [WIDE], n=2)
    for completion in (await collect(engine, request)).values():
        assert_log_probs(old, request, completion)
    await engine.update_weights(load_file(folders["new"] / "model.safetensors").items(), version=1)
    for completion in (await collect(engine, request)).values():
        assert_log_probs(new, request, completion)
        assert set(completion.weight_versions.tolist()) == {1}
    await engine.update_weights(load_file(folders["old"] / "model.safetensors").items(), version=2)


@pytest.mark.slow
async def test_vllm_looks_at_images_again_where_it_computes_keys_and_values_again(
    folders: dict[str, Path], processor: VisionProcessor
) -> None:
    engine = make_engine("vllm", folders["old"], recompute_kv=True)
    request = make_request(processor, "wide", [WIDE])
    running = asyncio.create_task(collect(engine, request))
    await until_sampled(engine, 3)
    await engine.update_weights(load_file(folders["new"] / "model.safetensors").items(), version=1)
    [completion] = (await running).values()
    await engine.close()
    versions = completion.weight_versions
    assert set(versions.tolist()) == {0, 1}
    new = Reference.load(folders["new"])
    expected = new.log_probs_of_text(
        request.prompt_token_ids, request.images, completion.token_ids.tolist()
    ).numpy()
    np.testing.assert_allclose(
        completion.log_probs[versions == 1], expected[versions == 1], atol=TOLERANCE, rtol=0
    )


async def test_aborted_samples_continue_after_their_images(
    folders: dict[str, Path], processor: VisionProcessor, engine: Engine
) -> None:
    reference = Reference.load(folders["old"])
    requests = [pickle.loads(pickle.dumps(r)) for r in make_requests(processor, n=2)]
    found, num_aborts = await in_parts(engine, *requests, num_tokens=20)
    assert num_aborts
    for request in requests:
        for index in range(2):
            assert_log_probs(reference, request, found[request.request_id, index])
    if isinstance(engine, HFEngine):
        whole = await collect(engine, *requests)
        assert {k: c.token_ids.tolist() for k, c in found.items()} == {
            k: c.token_ids.tolist() for k, c in whole.items()
        }


async def test_an_image_token_that_the_policy_wrote_is_text(
    folders: dict[str, Path], processor: VisionProcessor, engine: Engine
) -> None:
    reference = Reference.load(folders["old"])
    request = make_request(processor, "wide", [WIDE])
    tokens = [50, IMAGE, IMAGE, 51]
    cut_short = Completion(
        request_id="wide",
        index=0,
        token_ids=np.array(tokens),
        log_probs=reference.log_probs_of_text(request.prompt_token_ids, [WIDE], tokens).numpy(),
        weight_versions=np.zeros(4, np.int32),
        finish_reason="abort",
    )
    [completion] = (await collect(engine, replace(request, prefixes=(cut_short,)))).values()
    assert completion.token_ids.tolist()[:4] == tokens
    assert completion.token_ids.size > 4
    assert_log_probs(reference, request, completion)


async def refused(engine: Engine, request: Request, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        await collect(engine, request)


async def test_images_that_do_not_fit_the_prompt_are_refused(
    folders: dict[str, Path], processor: VisionProcessor
) -> None:
    engine = HFEngine.from_pretrained(folders["old"])
    wide = make_request(processor, "wide", [WIDE])
    side_by_side = (40, *[IMAGE] * 12, 41)
    for request in (
        replace(wide, images=(SMALL,)),
        replace(wide, images=(WIDE, WIDE)),
        replace(wide, prompt_token_ids=(40, 41)),
        replace(wide, prompt_token_ids=side_by_side, images=(WIDE, TALL)),
    ):
        await refused(engine, request, "apart from the next")
    await refused(engine, replace(wide, images=(b"no picture",)), "no image file")
    await refused(engine, replace(wide, images=(WIDE[:2000],)), "does not decode")
    await engine.close()


def test_places_and_images_are_as_many(processor: VisionProcessor) -> None:
    assert processor.expand([40, IMAGE, 41], [WIDE]) == (40, *[IMAGE] * 6, 41)
    with pytest.raises(RequestError, match="a prompt has 2 images; expected 1"):
        processor.expand([40, IMAGE, 41], [WIDE, TALL])
    with pytest.raises(RequestError, match=r"images of \[6, 1\] tokens and places of \[7\]"):
        processor.expand([40, IMAGE, IMAGE, 41], [WIDE, SMALL])


async def test_an_engine_that_sees_nothing_refuses_images(
    tied: TinyModel, processor: VisionProcessor
) -> None:
    request = make_request(processor, "wide", [WIDE])
    engine = HFEngine.from_pretrained(tied.path)
    await refused(engine, request, "has 1 images; expected none")
    await engine.close()


def test_a_folder_that_sees_nothing_has_no_processor(
    tied: TinyModel, tmp_path: Path, folders: dict[str, Path]
) -> None:
    with pytest.raises(
        EngineModelError, match=r"is 'qwen2'; expected one of gemma3, .* for images"
    ):
        VisionProcessor.from_pretrained(tied.path)
    (tmp_path / "config.json").write_bytes((folders["old"] / "config.json").read_bytes())
    with pytest.raises(EngineModelError, match="preprocessor_config"):
        VisionProcessor.from_pretrained(tmp_path)


def test_vllm_names_what_it_lacks(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gcore_rollout.engines.vllm.process.find_spec", lambda _: None)
    with pytest.raises(RolloutError, match="torchvision"):
        VLLMEngine.from_pretrained(folders["old"])


async def test_weights_of_other_names_are_refused(folders: dict[str, Path]) -> None:
    engine = HFEngine.from_pretrained(folders["old"])
    weights = load_file(folders["new"] / "model.safetensors")
    del weights["visual.patch_embed.proj.weight"]
    with pytest.raises(ValueError, match=r"missing names \['visual.patch_embed.proj.weight'\]"):
        await engine.update_weights(weights.items(), version=1)
    await engine.close()


def test_damaged_images_are_no_images() -> None:
    """And neither are files that would be gigabytes of pixels."""
    header = SMALL[12:16] + (65536).to_bytes(4, "big") * 2 + SMALL[24:29]
    large = SMALL[:12] + header + crc32(header).to_bytes(4, "big") + SMALL[33:]
    cases = {
        b"text": "is no image file that Pillow reads",
        large: "exceeds limit",
        SMALL[:2000]: "does not decode",
    }
    for damaged, message in cases.items():
        with pytest.raises(RequestError, match=message):
            decode_image(damaged)


def test_images_of_16_bits_are_scaled(tmp_path: Path) -> None:
    """A grey image of 16 bits has the pixels of the same one in 8; one of 32 bits is refused."""
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for suffix in ("png", "tiff"):
        file = tmp_path / f"grey.{suffix}"
        PIL.Image.fromarray(grey.astype(np.uint16) * 257).save(file)
        np.testing.assert_array_equal(
            decode_image(file.read_bytes()), np.stack([grey] * 3, axis=-1)
        )
    PIL.Image.fromarray(grey.astype(np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(RequestError, match="has 32 bits for a pixel of grey; expected 8 or 16"):
        decode_image((tmp_path / "float.tiff").read_bytes())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_the_camera_was_held(
    orientation: int, processor: VisionProcessor, tmp_path: Path
) -> None:
    """By EXIF's orientation; the oracle turns by its table."""
    stored = np.arange(56 * 84 * 3, dtype=np.uint32).astype(np.uint8).reshape(56, 84, 3)
    turned = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.swapaxes(0, 1),
        6: np.rot90(stored, -1),
        7: stored[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(stored, 1),
    }
    picture = PIL.Image.fromarray(stored)
    exif = picture.getexif()
    exif[0x0112] = orientation
    picture.save(tmp_path / "turned.png", exif=exif)
    file = (tmp_path / "turned.png").read_bytes()
    np.testing.assert_array_equal(decode_image(file), turned[orientation])
    _, height, width = processor.process([file]).grid_thw[0]
    assert (height > width) == (orientation >= 5)
    assert processor.num_tokens(file) == height * width // 4
