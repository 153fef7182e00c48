"""How many of the tokens that pass through a model's layers are needed."""

from collections.abc import Sequence

from gcore_bench.trainer.options import TrainerOptions
from gcore_bench.trainer.rounds import step_batches
from gcore_trainer import Sample, pack

WAYS = ("trl", "gcore-padded", "gcore-packed", "gcore-shared")


def token_rows(options: TrainerOptions, samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """For each way of batching, the computed tokens, and which of them are padding, again, and needed.

    Needed are each distinct prompt's tokens once and each response's, less its last, which predicts nothing.
    """
    prompts = {s.prompt_ids.tobytes(): s.prompt_ids.size for s in samples}
    inner = sum(s.response_ids.size - 1 for s in samples)
    needed = sum(prompts.values()) + inner
    given = sum(s.prompt_ids.size for s in samples) + inner
    rows: dict[str, dict[str, float]] = {}
    for way in WAYS:
        computed = computed_tokens(options, samples, way)
        rows[way] = {
            "computed": float(computed),
            # Shared prompts make fewer tokens than the samples have, and no padding.
            "real_fraction": min(given, computed) / computed,
            "needed_fraction": needed / computed,
        }
    return rows


def computed_tokens(options: TrainerOptions, samples: Sequence[Sample], way: str) -> int:
    """That pass through the layers in one step."""
    batches = [[samples[i] for i in batch] for batch in step_batches(options, samples, way)]
    match way:
        case "trl":
            width = max(s.prompt_ids.size for s in samples) + max(s.response_ids.size for s in samples)
            return len(samples) * width
        case "gcore-padded":
            return sum(len(b) * max(s.prompt_ids.size + s.response_ids.size - 1 for s in b) for b in batches)
        case _:
            return sum(pack(b, share_prefix=way == "gcore-shared").input_ids.size for b in batches)
