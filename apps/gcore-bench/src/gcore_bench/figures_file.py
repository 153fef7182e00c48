"""The file with every figure of a bench."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any


def write_figures(path: Path | None, options: Any, parts: Sequence[Mapping[str, object]]) -> None:
    """Write what was measured, beside the options that it was measured with; nothing where no file is asked for.

    Args:
        path: of the file.
        options: a dataclass; files among them are left out.
        parts: of the bench.
    """
    if path is None:
        return
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(options).items()}
    plain = {name: value for name, value in plain.items() if not isinstance(value, Path)}
    path.write_text(json.dumps({"options": plain, "parts": list(parts)}, indent=1) + "\n")
