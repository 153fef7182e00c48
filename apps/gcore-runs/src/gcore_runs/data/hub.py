"""Models and data sets of the Hugging Face Hub by name: downloaded once, and pinned to a commit."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gcore_runs.data.cache import cache_folder
from gcore_runs.errors import UserError
from gcore_runs.logs import one_line

_SHA = re.compile("[0-9a-f]{40}")
_DATASET = re.compile(
    r"hf://(?P<repo>[^/@:\s]+/[^/@:\s]+)(@(?P<revision>[^/:\s]+))?(/(?P<subset>[^:\s]+))?(:(?P<split>[\w.-]+))?"
)
_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_OTHER_FORMS = ["original/*", "consolidated*", "onnx/*", "openvino*", "*.fp16.*", "*.non_ema.*"]
"""Files of model repositories with weights that others of the repository have, too."""


def download_model(name: str, *, setting: str, files: list[str] = _MODEL_FILES) -> Path:
    """Return the folder of a model ``NAMESPACE/NAME[@REVISION]``, whose name is its commit; download what is missing.

    Without a network it is what was downloaded before. `UserError`, which names ``setting``, if there is nothing.
    """
    from huggingface_hub import snapshot_download

    repo, _, revision = name.partition("@")
    try:
        folder = Path(
            snapshot_download(
                repo, revision=revision or None, allow_patterns=files, ignore_patterns=_OTHER_FORMS
            )
        )
        if files is _MODEL_FILES and not any(folder.rglob("*.safetensors")):
            snapshot_download(
                repo, revision=folder.name, allow_patterns="*.bin", ignore_patterns=_OTHER_FORMS
            )
    except Exception as error:
        # Those of the network have types of their own in every version.
        raise UserError(
            f"{setting} is {name!r}; expected an existing folder, or a model on the Hub: {_reason(error, revision)}"
        ) from error
    return folder


@dataclass(frozen=True, kw_only=True)
class DatasetName:
    """A split of a data set on the Hub, ``hf://NAMESPACE/NAME[@REVISION][/SUBSET][:SPLIT]``."""

    repo: str
    revision: str | None = None
    subset: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, source: str, *, setting: str) -> "DatasetName":
        """Return the parts of a name; `UserError`, which names ``setting``, for another form."""
        match = _DATASET.fullmatch(source)
        if match is None:
            raise UserError(
                f"{setting} is {source!r}; expected hf://NAMESPACE/NAME[@REVISION][/SUBSET][:SPLIT], such as "
                "hf://openai/gsm8k/main:train"
            )
        return cls(**match.groupdict())

    def __str__(self) -> str:
        parts = (("@", self.revision), ("/", self.subset), (":", self.split))
        return f"hf://{self.repo}" + "".join(f"{mark}{part}" for mark, part in parts if part)


def dataset_files(name: DatasetName, *, setting: str) -> tuple[str, list[Path]]:
    """Return the commit of a data set on the Hub, and the Arrow files of the split, downloaded unless they are cached.

    `datasets` makes the files, in its own cache; they are found again without it and without a network. The split is
    ``train`` if none is named. Raises as `download_model`.
    """
    is_pinned = name.revision is not None and _SHA.fullmatch(name.revision)
    if is_pinned:
        remembered = _read_memo(name)
        if remembered:
            return remembered
    if find_spec("datasets") is None:
        raise UserError(
            f"{setting} is {str(name)!r}; expected `datasets` to be installed for data of the Hub: "
            "pip install 'gcore-runs[hub]'"
        )
    try:
        pinned_name = name if is_pinned else replace(name, revision=_newest_commit(name))
        commit, files = _load(pinned_name)
    except Exception as error:
        remembered = _read_memo(name)
        if remembered:
            return remembered
        # `datasets` raises errors of many types.
        raise UserError(
            f"{setting} is {str(name)!r}; expected a data set on the Hub: {_reason(error, name.revision)}"
        ) from error
    content = json.dumps({"commit": commit, "files": list(map(str, files))})
    for key in {name, replace(name, revision=commit)}:
        memo = _memo(key)
        new_memo = memo.with_suffix(f".{os.getpid()}")
        memo.parent.mkdir(parents=True, exist_ok=True)
        new_memo.write_text(content)
        new_memo.replace(memo)
    return commit, files


def _newest_commit(name: DatasetName) -> str:
    from huggingface_hub import HfApi

    return str(HfApi().dataset_info(name.repo, revision=name.revision).sha)


def _load(name: DatasetName) -> tuple[str, list[Path]]:
    from datasets import load_dataset
    from datasets.utils import disable_progress_bars

    disable_progress_bars()
    loaded = load_dataset(
        name.repo, name.subset, split=name.split or "train", revision=name.revision
    )
    if not loaded.cache_files:
        raise ValueError("it has no rows in files")
    return str(name.revision), [Path(file["filename"]) for file in loaded.cache_files]


def _memo(name: DatasetName) -> Path:
    """Return the file that says which commit and files a name stood for when it was last looked up."""
    return (
        cache_folder()
        / "hub"
        / (re.sub(r"[^\w.-]+", "--", str(name).removeprefix("hf://")) + ".json")
    )


def _read_memo(name: DatasetName) -> tuple[str, list[Path]] | None:
    """Return the commit and files of a name as of its last look-up; None: there was none, or files are gone."""
    if not _memo(name).is_file():
        return None
    memo = json.loads(_memo(name).read_text())
    files = [Path(file) for file in memo["files"]]
    if not all(file.is_file() for file in files):
        return None
    return memo["commit"], files


def _reason(error: Exception, revision: str | None) -> str:
    """Return why something on the Hub cannot be had, in a line."""
    from huggingface_hub import errors

    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__

    def has(*error_types: type[BaseException]) -> bool:
        return any(isinstance(cause, error_types) for cause in causes)

    if has(errors.GatedRepoError):
        return "its terms are to be accepted on its page first, by the account of `hf auth login`"
    if has(errors.RevisionNotFoundError):
        return f"it has no revision {revision!r}"
    if has(errors.RepositoryNotFoundError):
        return "there is none of this name, or it is private and needs `hf auth login`"
    if has(errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError):
        return "the Hub cannot be reached, and it was not downloaded before"
    return f"{type(error).__name__}: {one_line(error)}"


def pin_revisions(
    models: Mapping[str, str | Sequence[str]],
    sources: Mapping[str, Sequence[str]],
    before: Mapping[str, Any],
    is_hub_model: Callable[[str], bool],
) -> dict[str, Any]:
    """Return settings with commits in place of revisions that may move.

    Args:
        models: folders and names of models, by setting.
        sources: sources of rows, by setting.
        before: the settings of the run that is resumed, as its file has them: what they pin stays, unless a revision
            is named now.
        is_hub_model: distinguishes the names from folders.
    """
    pins: dict[str, Any] = {}
    for setting, names in models.items():
        earlier = _value(before, setting)
        if isinstance(names, str):
            pins[setting] = _pin_model(names, earlier, setting, is_hub_model)
        else:
            by_repo = {str(name).partition("@")[0]: name for name in earlier or ()}
            pins[setting] = tuple(
                _pin_model(name, by_repo.get(name), setting, is_hub_model) for name in names
            )
    for setting, names in sources.items():
        earlier = _value(before, setting) or []
        pins[setting] = tuple(_pin_source(source, earlier, setting) for source in names)
    return pins


def _pin_model(name: str, before: Any, setting: str, is_hub_model: Callable[[str], bool]) -> str:
    repo, _, revision = name.partition("@")
    if not is_hub_model(name) or _SHA.fullmatch(revision):
        return name
    if not revision and str(before).startswith(f"{repo}@"):
        return before
    return f"{repo}@{download_model(name, setting=setting).name}"


def _pin_source(source: str, before: Sequence[str], setting: str) -> str:
    label, mark, rest = source.partition("=hf://")
    if mark and label.isidentifier():
        earlier = [
            name.removeprefix(f"{label}=") for name in before if name.startswith(f"{label}=")
        ]
        return f"{label}={_pin_source(f'hf://{rest}', earlier, setting)}"
    if not source.startswith("hf://"):
        return source
    name = DatasetName.parse(source, setting=setting)
    if name.revision is None:
        for earlier in before:
            if not earlier.startswith("hf://"):
                continue
            if replace(DatasetName.parse(earlier, setting=setting), revision=None) == name:
                return earlier
    elif _SHA.fullmatch(name.revision):
        return source
    return str(replace(name, revision=dataset_files(name, setting=setting)[0]))


def _value(values: Mapping[str, Any], setting: str) -> Any:
    """Return a setting of nested tables; None if they do not have it."""
    value: Any = values
    for part in setting.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value
