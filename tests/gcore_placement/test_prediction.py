"""The predicted step of a placement that is given."""

from typing import Literal

import pytest
from planning_jobs import make_cluster, make_job

from gcore_placement import (
    Efficiency,
    EngineLayout,
    PlacementError,
    StepTime,
    TrainingLayout,
    predict_layout,
)
from gcore_placement.planning.layouts import TrainingLayouts
from gcore_placement.planning.memory import resident_state, training_memory

LAYOUT = TrainingLayout(
    backend="torch",
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    context_parallel_size=1,
    data_parallel_size=8,
    gradient_checkpointing=True,
    ppo_max_token_len=16384,
)


def step(*, takes_turns: bool, host_moves: int | None) -> StepTime:
    engines = EngineLayout(num_engines=4, devices_per_engine=2)
    return predict_layout(
        make_cluster(8), make_job(), LAYOUT, engines, takes_turns=takes_turns, host_moves=host_moves
    )


@pytest.mark.parametrize(
    ("takes_turns", "host_moves", "moves"), [(True, None, 1), (False, None, 0), (False, 4, 4)]
)
def test_states_that_move_to_the_host_and_back(
    takes_turns: Literal[True, False], host_moves: int | None, moves: int
) -> None:
    """Each move takes twice a rank's bytes over the rate to the host."""
    job, cluster = make_job(), make_cluster(8)
    state_bytes = float(resident_state(training_memory(job, TrainingLayouts(LAYOUT)))[0])
    move_s = 2 * state_bytes / (cluster.device.host_bytes_per_s * Efficiency().host)
    still, moved = (
        step(takes_turns=takes_turns, host_moves=0),
        step(takes_turns=takes_turns, host_moves=host_moves),
    )
    assert moved.training_s - still.training_s == pytest.approx(moves * move_s)
    assert moved.generation_s == still.generation_s


def test_a_judge_needs_engines() -> None:
    engines = EngineLayout(num_engines=4, devices_per_engine=2)
    with pytest.raises(PlacementError, match=r"judge is .*; expected given with job\.judge"):
        predict_layout(make_cluster(8), make_job(), LAYOUT, engines, engines)
