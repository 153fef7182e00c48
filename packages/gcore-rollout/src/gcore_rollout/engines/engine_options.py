"""Options of an engine's own library, which settings pass on by name: those of vLLM's `EngineArgs` or SGLang's server.

The names that there are, are read from the library's source: importing vLLM takes seconds and changes the process.
"""

import ast
import json
from collections.abc import Collection, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

VLLM_RESERVED = frozenset(
    [
        "model",
        "model_weights",
        "load_format",
        "weight_transfer_config",
        "tokenizer",
        "skip_tokenizer_init",
        "dtype",
        "seed",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "runner",
        "convert",
        "generation_config",
        "logprobs_mode",
        "enable_return_routed_experts",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "nnodes",
        "node_rank",
        "device_ids",
        "distributed_executor_backend",
        "worker_cls",
        "enable_sleep_mode",
        "sleep_preserve_parameter_names",
    ]
)
"""Arguments of vLLM that gcore gives itself, some of them by settings of their own."""
SGLANG_RESERVED = frozenset(
    [
        "model_path",
        "load_format",
        "tokenizer_path",
        "skip_tokenizer_init",
        "dtype",
        "random_seed",
        "device",
        "host",
        "port",
        "context_length",
        "max_running_requests",
        "mem_fraction_static",
        "base_gpu_id",
        "tp_size",
        "pp_size",
        "dp_size",
        "nnodes",
        "node_rank",
        "is_embedding",
        "incremental_streaming_output",
        "disable_overlap_schedule",
        "enable_memory_saver",
        "enable_weights_cpu_backup",
    ]
)
"""Arguments of SGLang that gcore gives itself, some of them by settings of their own."""


@cache
def vllm_names() -> frozenset[str] | None:
    """Return the fields of the installed vLLM's `EngineArgs`; None where it is not installed."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    return _read_fields(Path(spec.origin).parent / "engine/arg_utils.py", "EngineArgs")


@cache
def sglang_names(server_python: str) -> frozenset[str] | None:
    """Return the fields of `ServerArgs` of the SGLang in a Python's environment; None where there is none here."""
    environment = Path(server_python).expanduser().parent.parent
    for source in environment.glob("lib/python3*/site-packages/sglang/srt/server_args.py"):
        return _read_fields(source, "ServerArgs")
    return None


def _read_fields(source: Path, owner: str) -> frozenset[str] | None:
    if not source.is_file():
        return None
    for node in ast.parse(source.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            names: set[str] = set()
            for entry in node.body:
                if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                    names.add(entry.target.id)
            return frozenset(names)
    return None


def find_unfit_option(
    options: Collection[str], *, reserved: Collection[str], accepted: Collection[str] | None
) -> tuple[str, str] | None:
    """Return the first option that cannot be passed on, and what is expected instead; None if all can."""
    for name in options:
        if name in reserved:
            return name, f"none of {', '.join(sorted(reserved))}, which gcore gives"
        if accepted is not None and name not in accepted:
            from difflib import get_close_matches

            expected = "options that the engine has"
            near = get_close_matches(name, accepted, n=3, cutoff=0.6)
            if near:
                expected += f", such as {', '.join(near)}"
            return name, expected
    return None


def as_server_args(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line: true is a switch, false is left out, and tables are JSON.

    Example:
        >>> as_server_args({"attention_backend": "fa3", "enable_torch_compile": True, "json_model_override_args": {}})
        ['--attention-backend', 'fa3', '--enable-torch-compile', '--json-model-override-args', '{}']
    """
    words: list[str] = []
    for name, value in options.items():
        if value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, Mapping):
            words.append(json.dumps(value))
        elif isinstance(value, list | tuple):
            words.extend(str(entry) for entry in value)
        elif value is not True:
            words.append(str(value))
    return words
