"""Every causal LM of transformers is scored as transformers does, or refused, as packages/gcore-trainer/docs says."""

from pathlib import Path

import numpy as np
import pytest
from model_table import check_mesh_of_one, outcome, rows, world_of_one
from tiny_models import MODEL_TYPES, UNBUILT
from tiny_vision_model import save_vision_model

from gcore_trainer import Sample

pytestmark = pytest.mark.slow

_CHUNKS = 8


def test_the_table_has_a_row_for_every_model_type() -> None:
    assert sorted(rows()) == sorted(MODEL_TYPES)
    assert set(UNBUILT) <= set(MODEL_TYPES)


# Some of transformers' modules use what torch deprecates.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("chunk", range(_CHUNKS))
def test_models_are_scored_or_refused_as_the_table_says(chunk: int) -> None:
    types = MODEL_TYPES[chunk::_CHUNKS]
    expected = rows()
    with world_of_one():
        assert {t: outcome(t) for t in types} == {t: expected[t] for t in types}


def test_a_vision_model_is_the_same_on_a_mesh_of_one(tmp_path: Path) -> None:
    samples = [Sample(prompt_ids=np.arange(9) + i, response_ids=np.arange(5)) for i in range(3)]
    with world_of_one():
        check_mesh_of_one(save_vision_model(tmp_path, tie=False), samples)
