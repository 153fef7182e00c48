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


@pytest.mark.parametrize(
    ("num_devices", "num_ranks", "engines", "colocated", "expected_s"),
    [
        # gathered, to the host and into the store, nothing between nodes, to the ranks of an engine and their devices
        (8, 8, (4, 2), True, 14 / 315 + 2 / 25.6 + 4 / 18.7 + 0 + 16 / 18.7 + 8 / 25.6),
        # Two nodes: each has half of the weights, and ranks gather at the rate between nodes.
        (16, 16, (8, 2), True, 15 / 35 + 1 / 25.6 + 2 / 18.7 + 8 / 35 + 16 / 18.7 + 8 / 25.6),
        # An engine with a device reads the store in place.
        (8, 8, (8, 1), True, 14 / 315 + 2 / 25.6 + 4 / 18.7 + 0 + 16 / 25.6),
        (8, 4, (4, 1), False, 12 / 315 + 4 / 25.6 + 8 / 18.7 + 0 + 16 / 25.6),
        (16, 8, (8, 1), False, 14 / 315 + 2 / 25.6 + 4 / 18.7 + 16 / 35 + 16 / 25.6),
        # One node sends to two.
        (24, 8, (16, 1), False, 14 / 315 + 2 / 25.6 + 4 / 18.7 + 32 / 35 + 16 / 25.6),
    ],
)
def test_seconds_of_a_weight_update_by_the_links_that_it_takes(
    num_devices: int, num_ranks: int, engines: tuple[int, int], colocated: bool, expected_s: float
) -> None:
    """Of 16 GB on H100s: in GB and GB/s, 450 x 0.7 by NVLink, 64 x 0.4 by PCIe, 50 x 0.7 between nodes."""
    num_engines, devices_per_engine = engines
    seconds = Efficiency(all_reduce_s=0.0).weight_sync_seconds(
        make_cluster(num_devices),
        16e9,
        num_ranks=num_ranks,
        engine_devices=num_engines * devices_per_engine,
        devices_per_engine=devices_per_engine,
        colocated=colocated,
    )
    assert seconds == pytest.approx(expected_s, rel=1e-2)


@pytest.mark.parametrize("takes_turns", [True, False])
def test_a_predicted_step_has_the_seconds_of_its_weight_update(
    takes_turns: Literal[True, False],
) -> None:
    job = make_job()
    predicted = step(takes_turns=takes_turns, host_moves=0)
    assert predicted.weight_sync_s == pytest.approx(
        Efficiency().weight_sync_seconds(
            make_cluster(8),
            2 * job.policy.num_parameters,
            num_ranks=8,
            engine_devices=8,
            devices_per_engine=2,
            colocated=takes_turns,
        )
    )
