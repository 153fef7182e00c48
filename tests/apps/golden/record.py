"""Record the golden runs by the present code: ``python tests/apps/golden/record.py [--add] [NAME ...]``.

Records that are there are replaced. With ``--add`` they stay, for a machine that rounds otherwise than one of its name.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "startup"))

from command_line import Cli, Server, served
from forks import SOCKET
from golden_runs import FOLDER, RUNS, execute, fingerprint, records


def text(recorded: Mapping[str, object]) -> str:
    """Return JSON with a line for each metric."""
    parts: list[str] = []
    for key, value in recorded.items():
        if isinstance(value, dict):
            entries = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            parts.append(f' "{key}": {{\n{entries}\n }}' if entries else f' "{key}": {{}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(names: list[str], *, adds: bool = False) -> None:
    for app in sorted({RUNS[name].app for name in names}):
        with tempfile.TemporaryDirectory() as logs:
            os.environ |= {SOCKET: f"{logs}/{app}", "PYTHONPATH": os.pathsep.join(sys.path[:3])}
            with served(app, Path(logs)) as server:
                for name in names:
                    if RUNS[name].app == app:
                        record(name, server, adds=adds)


def record(name: str, server: Server, *, adds: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recorded = {"fingerprint": fingerprint()} | execute(name, Cli(server, Path(folder)))
    present = records(name)
    number = ""
    if adds and present:
        number = f".{len(present) + 1}"
    else:
        for path in present:
            path.unlink()
    (FOLDER / f"{name}{number}.json").write_text(text(recorded))
    print(f"recorded {name}", flush=True)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main([name for name in arguments if name != "--add"] or list(RUNS), adds="--add" in arguments)
