"""The folders with the `config.json` of the recipes' models, so that a dry run needs no download."""

from pathlib import Path

_FOLDER = Path(__file__).parent / "configs"


def shape_folder(model: str) -> Path:
    """Return a model's folder; where there is none, the one here with the `config.json` of a model of this name."""
    given, shipped = Path(model), _FOLDER / Path(model).name
    return shipped if not given.is_dir() and shipped.is_dir() else given
