"""The errors of this package, and the reading of JSON files that raises them."""

import json
from pathlib import Path
from typing import Any


class PlacementError(ValueError):
    """Wrong input; the message has the form `FIELD is VALUE; expected ACCEPTED`."""


def refusal(field: str, value: object, accepted: str) -> PlacementError:
    """Return the error for a field whose value is not accepted: `FIELD is VALUE; expected ACCEPTED`."""
    return PlacementError(f"{field} is {value!r}; expected {accepted}")


def read_json(
    field: str, path: str | Path, name: str, *, accepted: str, content: str
) -> dict[str, Any]:
    """Read a file with a JSON object, or the file `name` in a folder; PlacementError if it is neither."""
    file = Path(path) / name if Path(path).is_dir() else Path(path)
    try:
        contents: Any = json.loads(file.read_text())
    except FileNotFoundError:
        raise refusal(field, str(file), accepted) from None
    except ValueError as error:
        raise PlacementError(f"{file} is not JSON; expected {content} ({error})") from None
    if not isinstance(contents, dict):
        raise PlacementError(f"{file} is a JSON {type(contents).__name__}; expected an object")
    return contents


class _MissingExtraError(PlacementError, ImportError):
    """Also an ImportError, without which a process that imports modules before their use ends."""


def make_extra_error(module: str, extra: str) -> PlacementError:
    """Return the error for an optional dependency that is not installed, with the install command."""
    return _MissingExtraError(
        f"{module!r} is not installed: pip install 'gcore-placement[{extra}]'"
    )
