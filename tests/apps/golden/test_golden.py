"""Twenty steps of every command give the metrics that are recorded in `metrics`; `record.py` records them again.

A run in one thread is equal to the bit, its exported weights included, where processor and torch are those of the
record; two machines whose processors have one name can differ, and each has a record then. Other processors round
otherwise, and a rounding may flip a sampled token: there the first steps are compared, within a tolerance, and the
test's output says so.
"""

import json
from pathlib import Path

import pytest
from command_line import Cli, Server
from golden_runs import (
    FIRST_STEPS,
    FOLDER,
    NUM_STEPS,
    RUNS,
    SLOW,
    differences,
    execute,
    fingerprint,
    records,
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in RUNS]
)
def test_metrics_are_those_recorded(
    request: pytest.FixtureRequest, tmp_path: Path, name: str
) -> None:
    run = RUNS[name]
    recorded = [json.loads(path.read_text()) for path in records(name)]
    here, there = fingerprint(), recorded[0]["fingerprint"]
    if here != there:
        print(
            f"recorded on {there}, compared on {here}: the first {FIRST_STEPS} steps, within a tolerance"
        )
    server: Server = request.getfixturevalue(
        "server" if run.app == "gcore_llm" else "diffusion_server"
    )
    found = execute(name, Cli(server, tmp_path))
    num_steps = NUM_STEPS if here == there else FIRST_STEPS
    is_exact = run.is_exact and here == there
    differing = [
        differences(found, record, num_steps=num_steps, is_exact=is_exact) for record in recorded
    ]
    assert [] in differing, "\n".join(differing[0])


def test_every_record_belongs_to_a_run() -> None:
    assert {path.name.partition(".")[0] for path in FOLDER.iterdir()} == RUNS.keys()


def test_a_difference_is_found() -> None:
    golden = {"metrics": {"step": [1, 2, 3], "actor/pg_loss": [0.5, None, 0.25]}, "export": {}}
    rounded = {
        "metrics": {"step": [1, 2, 3], "actor/pg_loss": [0.5, None, 0.250000001]},
        "export": {},
    }
    other = {"metrics": {"step": [1, 2, 3], "actor/pg_loss": [0.5, 0.0, 0.26]}, "export": {}}
    assert differences(rounded, golden, num_steps=2, is_exact=True) == []
    assert differences(rounded, golden, num_steps=3, is_exact=False) == []
    assert differences(rounded, golden, num_steps=3, is_exact=True) == [
        "actor/pg_loss is 0.250000001 in step 3; expected 0.25"
    ]
    assert differences(other, golden, num_steps=3, is_exact=False) == [
        "actor/pg_loss is 0.0 in step 2; expected None"
    ]
    missing = {"metrics": {"step": [1, 2, 3]}, "export": {}}
    assert differences(missing, golden, num_steps=3, is_exact=False) == [
        "actor/pg_loss is recorded, and missing"
    ]
