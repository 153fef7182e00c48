"""`gcore-bench agents`, a quick real run: each contender answers all calls, and tokenization is counted apart."""

import json
from pathlib import Path

import pytest

from gcore_bench.cli import main


@pytest.mark.slow
def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["agents", "--quick", "--json", str(tmp_path / "figures.json")])
    [part] = json.loads((tmp_path / "figures.json").read_text())["parts"]
    rows = part["rows"]
    assert [row["calls"] for row in rows.values()] == [64] * 2
    ours = rows["endpoint"]
    assert 0 < ours["call_ms"] < ours["total_ms"] < 20
    assert rows["vllm serve"]["total_ms"] > 0
    assert "aim: the endpoint takes at most 1 CPU ms a call" in capsys.readouterr().out
