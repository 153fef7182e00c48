import gc
import os
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Server, served
from forks import MODULES, SOCKET
from hypothesis import HealthCheck, settings

# No deadline: a slow example only shows that the machine is busy. Each run has the same examples, so that a change is
# not refused because of an input that no run before it has tried. `--hypothesis-profile=random` tries new ones.
settings.register_profile(
    "fixed", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile(
    "random", settings.get_profile("fixed"), derandomize=False, max_examples=500
)
settings.load_profile("fixed")

# Two workers share two cores: with more threads than cores, OpenMP's threads wait for each other longer than they work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Ray reads it on import, which any test module may do first: under `uv run` it would build the environment again for
# every worker.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

# Actors at Ray's low priority of 15 get next to nothing of a core that another worker's test keeps busy.
os.environ.setdefault("RAY_worker_niceness", "0")

# A node that is gone fails five checks in a row: in 3 s rather than 13. A busy node has ten seconds for each, as ever.
os.environ.setdefault("RAY_health_check_period_ms", "500")

# Of the processes that tests start, and of this one, which has started without it.
_STARTUP = Path(__file__).parent / "startup"
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(_STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
)
runpy.run_path(str(_STARTUP / "sitecustomize.py"))

LONGEST_FIRST = (
    "apps/golden/test_golden.py",
    "apps/gcore_llm/test_train.py",
    "apps/gcore_llm/test_bad_input.py",
    "scripts/test_accept.py",
    "gcore_rollout/test_engines.py",
    "apps/gcore_diffusion/test_diffusion.py",
    "workspace/test_readmes.py",
    "apps/test_examples.py",
    "apps/gcore_llm/test_learner_ranks.py",
    "apps/gcore_llm/test_on_ray.py",
    "apps/gcore_llm/test_cluster_failures.py",
    "apps/gcore_llm/test_live_placement.py",
    "apps/gcore_bench/test_bench_placement.py",
    "apps/gcore_llm/test_elastic.py",
    "apps/gcore_bench/test_bench.py",
    "apps/gcore_bench/test_bench_controller.py",
    "apps/gcore_bench/test_bench_rollout.py",
    "apps/gcore_llm/test_rewards.py",
    "apps/gcore_llm/test_rollouts.py",
    "gcore_rollout/test_vllm_server.py",
    "apps/gcore_llm/test_policy_engines.py",
    "gcore_controller/test_ray_runtime.py",
    "gcore_controller/test_collectives.py",
    "apps/gcore_llm/test_ray_token.py",
    "gcore_rollout/test_ray_engine.py",
    "apps/gcore_llm/test_images.py",
    "gcore_rollout/test_engines_behind_engines.py",
    "gcore_rollout/test_engine_process.py",
    "gcore_trainer/test_megatron_training.py",
    "gcore_trainer/test_megatron_lora.py",
    "apps/gcore_llm/test_finetune_bad_input.py",
    "apps/gcore_llm/test_sft.py",
    "apps/gcore_llm/test_resume.py",
    "gcore_trainer/test_models.py",
    "workspace/test_wheels.py",
    "workspace/test_site.py",
)
"""The longest files of either command. A worker runs whole files, so the longest must not start last."""


@pytest.fixture(scope="session", autouse=True)
def forks(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Heavy processes are forks of the server of gcore_llm's commands, once a test has started that."""
    os.environ[SOCKET] = str(tmp_path_factory.mktemp("forks") / "gcore_llm")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served("gcore_llm", tmp_path_factory.mktemp("logs")) as server:
        yield server


@pytest.fixture(scope="session")
def diffusion_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served("gcore_diffusion", tmp_path_factory.mktemp("diffusion-logs")) as server:
        yield server


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of gcore_llm's commands that has imported vLLM, too."""
    with served("gcore_llm-vllm", tmp_path_factory.mktemp("vllm-logs")) as server:
        yield server


@pytest.fixture(scope="module")
def vllm_forks(vllm_server: Server) -> Iterator[None]:
    """Heavy processes, ranks of vLLM among them, are forks that have imported vLLM."""
    del vllm_server
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SOCKET, str(Path(os.environ[SOCKET]).with_name("gcore_llm-vllm")))
        yield


@pytest.fixture
def forked_commands(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that a test starts as `python -m`, and those that they start, are forks, too."""
    del server
    monkeypatch.setenv(MODULES, "1")


@pytest.fixture
def forked_diffusion_commands(diffusion_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, of a server that has imported diffusers."""
    del diffusion_server
    monkeypatch.setenv(MODULES, "1")
    monkeypatch.setenv(SOCKET, str(Path(os.environ[SOCKET]).with_name("gcore_diffusion")))


@pytest.fixture(scope="module")
def no_forks() -> Iterator[None]:
    """Every process of this file's tests is started by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(SOCKET)
        yield


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the folder that pytest is called in: a user's runs/default may be there."""
    monkeypatch.chdir(tmp_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    place = {tests / name: i for i, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_collection_finish() -> None:
    """Leave all that has been imported out of the garbage collections of the tests."""
    gc.freeze()
