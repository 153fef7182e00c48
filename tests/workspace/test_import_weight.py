"""Importing a package, or asking an app for help, loads nothing heavy."""

import subprocess
import sys

import pytest

HEAVY = {
    "datasets",
    "diffusers",
    "math_verify",
    "megatron",
    "pandas",
    "plotly",
    "pyarrow",
    "ray",
    "reasoning_gym",
    "scipy",
    "sglang",
    "swanlab",
    "tensorboard",
    "torch",
    "torchdata",
    "trackio",
    "transformers",
    "trl",
    "vllm",
    "wandb",
}
FOR_APPS = {"pydantic", "rich", "tyro"}

MUST_NOT_LOAD = {
    "gcore_agents": HEAVY | FOR_APPS | {"aiohttp", "numpy", "tokenizers"},
    "gcore_placement": HEAVY | FOR_APPS,
    "gcore_controller": HEAVY | FOR_APPS | {"numpy"},
    "gcore_ckpt": HEAVY | FOR_APPS | {"numpy", "safetensors"},
    "gcore_trainer": HEAVY | FOR_APPS | {"safetensors"},
    "gcore_rollout": HEAVY | FOR_APPS | {"safetensors"},
    "gcore_rollout.rewards": HEAVY | FOR_APPS | {"safetensors"},
    "gcore_llm": HEAVY,
    "gcore_llm.cli": HEAVY,
    "gcore_llm.training": (HEAVY - {"torch"}) | {"sklearn", "sympy"},
    "gcore_diffusion": HEAVY,
    "gcore_diffusion.cli": HEAVY,
    "gcore_diffusion.config": HEAVY,
    "gcore_diffusion.training": HEAVY,
    "gcore_runs": HEAVY,
    "gcore_bench.cli": HEAVY,
}


@pytest.mark.parametrize("module", MUST_NOT_LOAD)
def test_import_is_light(module: str) -> None:
    program = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    loaded = set(subprocess.check_output([sys.executable, "-c", program], text=True).split())
    assert not loaded & MUST_NOT_LOAD[module]
