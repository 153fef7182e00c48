"""The files that all contenders read."""

import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc

_WORDS = ["Natalia", "sold", "clips", "to", "48", "of", "her", "friends", "in", "April", "and", "half", "as", "many"]
_BATCH_ROWS = 10_000


def write_prompts(file: Path, num_rows: int, seed: int) -> None:
    """Write a JSONL file of questions like those of GSM8K, with answers."""
    rng = random.Random(seed)
    with file.open("w") as lines:
        for number in range(num_rows):
            question = f"{number}: {' '.join(rng.choices(_WORDS, k=45))}?"
            lines.write(json.dumps({"prompt": question, "answer": f"x = {number}\n#### {number}"}) + "\n")


def write_index(file: Path, num_rows: int) -> None:
    """Write an Arrow file with a number for each row."""
    schema = pa.schema({"prompt": pa.int64()})
    with pyarrow.ipc.new_file(str(file), schema) as writer:
        for first in range(0, num_rows, _BATCH_ROWS):
            numbers = np.arange(first, min(first + _BATCH_ROWS, num_rows))
            writer.write_batch(pa.record_batch([pa.array(numbers)], schema=schema))
