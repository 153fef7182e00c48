"""Train a vision-language model to count the shapes in a picture.

    uv run python examples/count_shapes.py

It draws pictures, makes a small Qwen2-VL with random weights, and fine-tunes it for a few steps, so that it answers
with one of five numbers. Then it rewards right ones, and prints the accuracy on held-out pictures before and after.
"""

import io
import random
import tempfile
from dataclasses import replace
from typing import Any

import transformers as hf
from PIL import Image, ImageDraw
from pyarrow import Table, parquet
from tokenizers import Tokenizer, models, pre_tokenizers

import gcore_llm as llm

SIDE, SHAPE = 32, 6  # pixels
TOKENS = {token: i for i, token in enumerate(".@[]12345")}  # . ends an answer, @ is a picture
PATCHES: dict[str, Any] = {"patch_size": 8, "temporal_patch_size": 1}


def draw(count: int) -> bytes:
    """Return a PNG file with shapes of random kinds, colours and places, which do not touch."""
    corners: list[tuple[int, int]] = []
    while len(corners) < count:
        x, y = random.choices(range(SIDE - SHAPE), k=2)
        if all(max(abs(x - left), abs(y - top)) > SHAPE for left, top in corners):
            corners.append((x, y))
    picture = Image.new("RGB", (SIDE, SIDE))
    canvas = ImageDraw.Draw(picture)
    for x, y in corners:
        centre = (x + SHAPE // 2, y + SHAPE // 2, SHAPE // 2)
        colour = tuple(random.choices(range(100, 256), k=3))
        canvas.regular_polygon(centre, n_sides=random.choice([3, 4, 6]), fill=colour)
    file = io.BytesIO()
    picture.save(file, "png")
    return file.getvalue()


def make_row() -> dict[str, object]:
    count = random.randint(1, 5)
    return {"prompt": "[@]", "completion": str(count), "images": draw(count)}


def is_right(_: str, completion: str, row: dict[str, str]) -> float:
    return float(completion == row["completion"])


def write_model(path: str) -> None:
    text = {"vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 128}
    text |= {"initializer_range": 0.05, "bos_token_id": None, "eos_token_id": 0}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    vision = {"depth": 2, "hidden_size": 64, "embed_dim": 64, "num_heads": 2, "mlp_ratio": 2}
    config = hf.Qwen2VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={**vision, **PATCHES, "initializer_range": 0.05},
        image_token_id=TOKENS["@"],
    )
    hf.Qwen2VLForConditionalGeneration(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel(TOKENS, unk_token="."))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    hf.PreTrainedTokenizerFast(tokenizer_object=words, eos_token=".").save_pretrained(path)
    area = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    hf.Qwen2VLImageProcessorPil(size=area, **PATCHES).save_pretrained(path)


def main(num_steps: int = 200, seed: int = 0) -> None:
    hf.set_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        write_model(f"{folder}/model")
        rows = f"{folder}/rows.parquet"
        shared: dict[str, Any] = {"runs_dir": folder, "threads": 1}
        parquet.write_table(Table.from_pylist([make_row() for _ in range(4000)]), rows)
        data = llm.RowsConfig(train_files=(rows,), image_key="images")
        sft = llm.SFTRunConfig(model=f"{folder}/model", data=data, **shared)
        short = llm.LengthConfig(total_training_steps=50)
        sft = replace(sft, optim=replace(sft.optim, lr=1e-3), trainer=short)
        data = llm.DataConfig(train_files=(rows,), image_key="images", val_size=256)
        config = llm.TrainConfig(
            model=str(llm.fine_tune(sft).run / "export"),
            reward=f"{__file__}:is_right",
            data=replace(data, train_batch_size=64, max_response_length=2),
            rollout=llm.RolloutConfig(n=8),
            actor=llm.ActorConfig(optim=llm.ActorOptimConfig(lr=7e-4, lr_scheduler_type="linear")),
            trainer=llm.TrainerConfig(total_training_steps=num_steps, test_freq=num_steps),
            **shared,
        )
        result = llm.train(config)
    name = "val/greedy/score/mean"
    print(f"{name}: {result.before[name]:.2f} before, {result.after[name]:.2f} after")


if __name__ == "__main__":
    main()
