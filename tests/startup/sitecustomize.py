"""Python runs this file at the start of every process of the tests: `tests/conftest.py` puts it on PYTHONPATH."""

import gc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import FrameType

# Importing torch and transformers makes a million objects, none of which is garbage. With Python's own thresholds the
# collector walks through them again and again, which is a quarter of such a process's start.
gc.set_threshold(10_000, 50, 100)

_find_spec = importlib.util.find_spec
_UNSEEN = {"bitsandbytes", "boto3", "sklearn"}
"""What libraries import where they find it, for features that are not used here; it takes seconds."""


def _find_without_extras(name: str, package: str | None = None) -> ModuleSpec | None:
    """Find everything but ``_UNSEEN``; an import does not come here."""
    return None if name in _UNSEEN else _find_spec(name, package)


_FORK_SERVERS = (
    "from multiprocessing.forkserver import main;",
    "from gcore_rollout.engines.remote.fork_server import serve;",
)


class _NotForPeft:
    """Lets peft, and so diffusers, do without bitsandbytes, whose import takes 3 CPU seconds."""

    def find_spec(self, name: str, *_: object) -> None:
        if name != "bitsandbytes":
            return
        caller: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # who imports is said nowhere else
        while caller is not None and caller.f_code.co_filename.startswith("<frozen importlib"):
            caller = caller.f_back
        if caller is not None and caller.f_globals.get("__name__", "").startswith("peft"):
            raise ModuleNotFoundError(name)


def _is_heavy(command: list[str]) -> bool:
    """Whether a fork takes its place.

    That is a worker of Ray, a fork server, a rank or server of vLLM, a launcher of ranks, or what a test asks one for.
    """
    match command:
        case ["-X", "fork", *_]:
            return True
        case ["-c", _, "--multiprocessing-fork"] | ["-m", "vllm.entrypoints.openai.api_server", *_]:
            return os.environ["GCORE_TESTS_FORKS"].endswith("-vllm")
        case ["-m", module, *_]:
            return module.startswith("gcore_") and "GCORE_TESTS_FORK_MODULES" in os.environ
        case ["-c", code]:
            return any(server in code for server in _FORK_SERVERS)
        case [path, *_]:
            return path.endswith(("/default_worker.py", "/bin/torchrun"))
        case _:
            return False


importlib.util.find_spec = _find_without_extras
sys.meta_path.insert(0, _NotForPeft())  # pyright: ignore[reportArgumentType]  # a finder needs no more

if "GCORE_TESTS_FORKS" in os.environ and _is_heavy(sys.orig_argv[1:]):
    # In the few processes that need it: it imports more than Python does at its start.
    import forks

    forks.run_in_a_fork(sys.orig_argv[1:])
