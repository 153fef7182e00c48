"""Every causal LM of transformers is scored as transformers does, or refused, as packages/gcore-trainer/docs says."""

import pytest
from model_table import outcome, rows
from tiny_models import MODEL_TYPES, UNBUILT

pytestmark = pytest.mark.slow

_CHUNKS = 8


def test_the_table_has_a_row_for_every_model_type() -> None:
    assert sorted(rows()) == sorted(MODEL_TYPES)
    assert set(UNBUILT) <= set(MODEL_TYPES)


# Some of transformers' modules use what torch deprecates.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("chunk", range(_CHUNKS))
def test_models_are_scored_or_refused_as_the_table_says(chunk: int) -> None:
    types = MODEL_TYPES[chunk::_CHUNKS]
    expected = rows()
    assert {t: outcome(t) for t in types} == {t: expected[t] for t in types}
