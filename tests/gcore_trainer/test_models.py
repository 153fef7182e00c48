"""Every causal LM and every model that reads images is scored as transformers does, or refused, as the tables say."""

from pathlib import Path

import numpy as np
import pytest
from model_table import check_mesh_of_one, outcome, rows, vision_rows, world_of_one
from tiny_models import MODEL_TYPES, UNBUILT
from tiny_vision_model import save_vision_model
from vision_models import VISION_TYPES
from vision_table import vision_outcome

from gcore_trainer import Sample

_CHUNKS = 8
_QUICK = ("aria", "gemma3", "mistral3", "qwen3_vl")
"""Types that read images of which the fast tests try one for each way of reading them, and one that is refused."""


def test_the_table_has_a_row_for_every_model_type() -> None:
    assert sorted(rows()) == sorted(MODEL_TYPES)
    assert set(UNBUILT) <= set(MODEL_TYPES)
    assert sorted(vision_rows()) == sorted(VISION_TYPES)


@pytest.mark.parametrize("model_type", _QUICK)
def test_a_model_that_reads_images_is_exact_or_refused(model_type: str) -> None:
    assert vision_outcome(model_type) == vision_rows()[model_type]


@pytest.mark.slow
# Of transformers' processors, which hand tensors to numpy.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("chunk", range(_CHUNKS))
def test_models_that_read_images_are_exact_or_refused(chunk: int) -> None:
    types = [t for t in VISION_TYPES if t not in _QUICK][chunk::_CHUNKS]
    expected = vision_rows()
    assert {t: vision_outcome(t) for t in types} == {t: expected[t] for t in types}


@pytest.mark.slow
# Some of transformers' modules use what torch deprecates.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("chunk", range(_CHUNKS))
def test_models_are_scored_or_refused_as_the_table_says(chunk: int) -> None:
    types = MODEL_TYPES[chunk::_CHUNKS]
    expected = rows()
    with world_of_one():
        assert {t: outcome(t) for t in types} == {t: expected[t] for t in types}


@pytest.mark.slow
def test_a_vision_model_is_the_same_on_a_mesh_of_one(tmp_path: Path) -> None:
    samples = [Sample(prompt_ids=np.arange(9) + i, response_ids=np.arange(5)) for i in range(3)]
    with world_of_one():
        check_mesh_of_one(save_vision_model(tmp_path, tie=False), samples)
