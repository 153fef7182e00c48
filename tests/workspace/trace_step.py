"""Trace a small `gcore-llm train` and count the source files that a reader has to know.

``python tests/workspace/trace_step.py`` prints how many functions in how many files are called from the command line to
the first generation, and from there round to the next step's; ``--files`` lists the files, ``--json`` their numbers.
"""

import contextlib
import importlib
import inspect
import io
import json
import os
import sys
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "apps"), str(ROOT / "tests" / "startup")]

NUM_STEPS = 3
PARTS = {"start": "from the command line to the first step", "step": "one GRPO step"}


class StepTrace:
    """The functions that are called before the first step and in the second, on all threads.

    A step is taken to begin with the first generation after a training step, so that a whole turn of the loop counts.
    """

    def __init__(self) -> None:
        self.called: dict[str, set[CodeType]] = {part: set() for part in PARTS}
        self._part: str | None = "start"
        self._num_steps = 0
        self._has_trained = True
        self._sources: dict[str, bool] = {}

    @contextlib.contextmanager
    def tracing(self) -> Generator[None]:
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # Bodies of modules and classes are read on import, not called.
        if (
            event != "call"
            or not code.co_flags & inspect.CO_OPTIMIZED
            or not self._is_ours(code.co_filename)
        ):
            return
        if (
            code.co_name == "generate"
            and "/gcore_rollout/" in code.co_filename
            and self._has_trained
        ):
            self._has_trained = False
            self._num_steps += 1
            self._part = "step" if self._num_steps == 2 else None
        elif code.co_name == "train_step" and "/gcore_trainer/" in code.co_filename:
            self._has_trained = True
        if self._part:
            self.called[self._part].add(code)

    def _is_ours(self, name: str) -> bool:
        found = self._sources.get(name)
        if found is None:
            found = self._sources[name] = "/src/gcore_" in name and name.startswith(str(ROOT))
        return found

    def functions(self, part: str) -> set[CodeType]:
        """Return the functions that were called, without comprehensions, which modules call when they are imported."""
        return {code for code in self.called[part] if not code.co_name.startswith("<")}

    def files(self, part: str) -> dict[str, list[str]]:
        """Return the files of each distribution in which a function was called."""
        found: dict[str, set[str]] = {}
        for code in self.functions(part):
            path = Path(code.co_filename).relative_to(ROOT)
            found.setdefault(path.parts[1], set()).add(path.relative_to(*path.parts[:1]).as_posix())
        return {name: sorted(paths) for name, paths in sorted(found.items())}

    def num_files(self, part: str) -> int:
        return sum(map(len, self.files(part).values()))


def trace() -> StepTrace:
    """Run `NUM_STEPS` steps on a tiny model, without held-out prompts, and return what they called."""
    from tiny_jobs import own_job

    from gcore_llm.cli import main
    from gcore_llm.tiny_model import make_tiny_model

    # Tracing the imports of other libraries would take longer than the run.
    for name in ("torch.utils.tensorboard", "transformers.models.qwen3.modeling_qwen3"):
        importlib.import_module(name)
    found = StepTrace()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        make_tiny_model(Path(folder) / "model", seed=0)
        args = [
            *own_job(Path(folder), Path(folder) / "model"),
            "--data.val-size",
            "0",
            "--runs-dir",
            f"{folder}/runs",
        ]
        args[args.index("--trainer.total-training-steps") + 1] = str(NUM_STEPS)
        with contextlib.redirect_stdout(io.StringIO()) as out, found.tracing():
            try:
                main(args)
            except SystemExit as end:
                if end.code:
                    raise RuntimeError(out.getvalue()) from end
    return found


def show(found: StepTrace, *, lists_files: bool) -> None:
    for part, title in PARTS.items():
        files, functions = found.files(part), found.functions(part)
        print(
            f"{title}: {len(functions)} functions in {found.num_files(part)} files of {len(files)} distributions"
        )
        if lists_files:
            for name, paths in files.items():
                print(f"  {name}: {len(paths)}", *(f"    {path}" for path in paths), sep="\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    traced = trace()
    if "--json" in sys.argv:
        print(json.dumps({part: traced.num_files(part) for part in PARTS}))
    else:
        show(traced, lists_files="--files" in sys.argv)
