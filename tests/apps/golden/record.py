"""Record the golden runs by the present code: ``python tests/apps/golden/record.py [NAME ...]``."""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from command_line import Cli, served
from golden_runs import FOLDER, RUNS, execute, fingerprint


def text(record: Mapping[str, object]) -> str:
    """Return JSON with a line for each metric."""
    parts: list[str] = []
    for key, value in record.items():
        if isinstance(value, dict):
            entries = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            parts.append(f' "{key}": {{\n{entries}\n }}' if entries else f' "{key}": {{}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(names: list[str]) -> None:
    for app in sorted({RUNS[name].app for name in names}):
        with tempfile.TemporaryDirectory() as logs, served(app, Path(logs)) as server:
            for name in names:
                if RUNS[name].app != app:
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    record = {"fingerprint": fingerprint()} | execute(
                        name, Cli(server, Path(folder))
                    )
                (FOLDER / f"{name}.json").write_text(text(record))
                print(f"recorded {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(RUNS))
