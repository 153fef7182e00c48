"""The folders with the `config.json` of the recipes' models, so that a dry run needs no download."""

from pathlib import Path

_FOLDER = Path(__file__).parent / "configs"


def shape_folder(model: str) -> Path:
    """Return a model's folder; where there is none, the one here with the `config.json` of a model of this name."""
    folder = Path(model)
    shipped = _FOLDER / folder.name
    if shipped.is_dir() and not folder.is_dir():
        return shipped
    return folder
