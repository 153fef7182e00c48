"""`gcore-bench data`, a quick real run: contenders read the same rows, and gcore's take no memory for them."""

import json
from pathlib import Path

import pytest

from gcore_bench.cli import main


@pytest.mark.slow
def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "--quick", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    prompts, index = (part["rows"] for part in found["parts"])
    assert prompts["gcore, first start"]["rows"] == 40_000
    assert prompts["gcore, first start"]["row_us"] < prompts["verl's way"]["row_us"]
    assert prompts["gcore, later starts"]["cpu_s"] < prompts["gcore, first start"]["cpu_s"]
    assert index["gcore"]["own_bytes"] < 2**24 < index["RandomSampler"]["own_bytes"]
    assert "aim: started in 10 s in under 1 GiB of its own: met" in capsys.readouterr().out
