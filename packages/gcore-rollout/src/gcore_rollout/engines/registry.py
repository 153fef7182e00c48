"""The registry of engines: the kinds that settings name, what each of them needs and takes, and how it is made.

Options of an engine's own library, vLLM's `EngineArgs` or SGLang's `ServerArgs`, are passed on by name. The names that
there are, are read from the library's source: importing vLLM takes seconds and changes the process.
"""

import ast
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from gcore_rollout.engines.protocol import Engine
from gcore_rollout.errors import EngineDiedError, RequestError, RolloutError
from gcore_rollout.rewards.registry import load_function

_NOTES = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Entries of a model's config.json that do not change what the model computes."""

PRELOAD_HF = ("gcore_rollout.engines.hf.engine",)
"""Modules that the process of any engine needs."""
PRELOAD_VLLM = (
    *PRELOAD_HF,
    "vllm.engine.arg_utils",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.gpu_model_runner",
)
"""Modules that the process of a `VLLMEngine` needs; a fork server with vLLM imported then stays in memory."""
PRELOAD_DIFFUSERS = ("gcore_rollout.engines.diffusion.engine", "diffusers.pipelines.pipeline_utils")
"""Modules that the process of a `DiffusersEngine` needs."""

_VLLM_RESERVED = frozenset(
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
        "return_sampling_mask",
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
_SGLANG_RESERVED = frozenset(
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


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """A kind of engine for a model folder, and what it needs.

    Example:
        >>> kind = EngineKind(make="gcore_rollout.engines.hf.engine:HFEngine", takes_device=True)
        >>> engine = kind.load().from_pretrained("model", max_num_seqs=8, device="cpu")
        >>> engine.weight_version
        0
    """

    make: str
    """``MODULE:CLASS`` with a method ``from_pretrained(model, *, dtype, max_num_seqs, eos_token_ids, ...)``; or of a
    server ``connect(url, *, model_path, max_num_seqs, eos_token_ids, ...)``."""
    is_server: bool = False
    """Whether it runs already, at a URL."""
    takes_device: bool = False
    """Whether it is made with a ``device``; otherwise it is on the first visible one."""
    takes_max_model_len: bool = True
    own_options: frozenset[str] = frozenset()
    """Further keywords of ``from_pretrained`` that not every kind has."""
    engine_options: frozenset[str] = frozenset()
    """Names of engine options of the user that ``from_pretrained`` or ``connect`` takes as keywords."""
    library_options: str = ""
    """The keyword that takes the user's other options, of the engine's library: engine_args, server_args, or none."""
    reserved_options: frozenset[str] = frozenset()
    """Names of the library's options that gcore gives itself, some of them by settings of their own."""
    takes_images: bool = False
    needs_own_process: bool = False
    """Whether two of them cannot share a process."""
    has_rope_of_batch: bool = False
    """Whether it computes rope_type ``longrope`` by the longest sequence of each batch."""
    preload: tuple[str, ...] = PRELOAD_HF
    """Modules to import before a process for it is forked."""
    is_own: bool = False
    """Whether it is a function of the user's, ``PATH.py:function`` in ``make``, called as ``from_pretrained``."""

    def load(self) -> Any:
        return resolve_name(self.make)


_KINDS = {
    "hf": EngineKind(
        make="gcore_rollout.engines.hf.engine:HFEngine",
        takes_device=True,
        own_options=frozenset(("return_routed_experts", "return_sampling_mask")),
        engine_options=frozenset(("decode_mode", "kv_cache_bytes")),
        takes_images=True,
    ),
    "vllm": EngineKind(
        make="gcore_rollout.engines.vllm.engine:VLLMEngine",
        own_options=frozenset(
            (
                "enable_sleep_mode",
                "tensor_parallel_size",
                "return_routed_experts",
                "return_sampling_mask",
            )
        ),
        engine_options=frozenset(
            (
                "gpu_memory_utilization",
                "max_num_batched_tokens",
                "async_scheduling",
                "seed_per_sample",
                "enable_expert_parallel",
                "speculative_config",
                "enforce_eager",
                "kv_cache_memory_bytes",
                "recompute_kv",
            )
        ),
        library_options="engine_args",
        reserved_options=_VLLM_RESERVED,
        takes_images=True,
        needs_own_process=True,
        preload=PRELOAD_VLLM,
    ),
    "sglang": EngineKind(
        make="gcore_rollout.engines.servers.sglang_engine:SGLangEngine",
        takes_device=True,
        own_options=frozenset(("enable_sleep_mode", "tensor_parallel_size")),
        engine_options=frozenset(("server_python", "gpu_memory_utilization")),
        library_options="server_args",
        reserved_options=_SGLANG_RESERVED,
        has_rope_of_batch=True,
    ),
    "vllm_server": EngineKind(
        make="gcore_rollout.engines.servers.vllm:VLLMServerEngine",
        is_server=True,
        engine_options=frozenset(("weights_dir",)),
    ),
    "sglang_server": EngineKind(
        make="gcore_rollout.engines.servers.sglang:SGLangServerEngine",
        is_server=True,
        engine_options=frozenset(("weights_dir",)),
        has_rope_of_batch=True,
    ),
}


def register_engine(name: str, kind: EngineKind) -> None:
    """Add a kind of engine, for settings to name; a `ValueError` if the name is taken."""
    if name in _KINDS:
        raise ValueError(
            f"name is {name!r}; expected one that is not registered yet: {', '.join(_KINDS)} are"
        )
    _KINDS[name] = kind


def engine_names(which: Callable[[EngineKind], bool] = lambda _: True) -> list[str]:
    """Return the names of the registered kinds, or of some of them."""
    return [name for name in _KINDS if which(_KINDS[name])]


def engine_kind(name: str) -> EngineKind:
    """Return the registered kind of this name, or the kind of the user's own that ``PATH.py:function`` makes."""
    if name in _KINDS:
        return _KINDS[name]
    if ".py:" not in name:
        raise RequestError(f"engine is {name!r}; expected {', '.join(_KINDS)} or PATH.py:function")
    return EngineKind(
        make=name,
        is_own=True,
        takes_device=True,
        takes_max_model_len=False,
        reserved_options=frozenset(("device", "dtype", "max_num_seqs", "eos_token_ids")),
    )


def engine_factory(
    name: str,
    model: str | Path,
    *,
    device: str,
    max_model_len: int | None = None,
    own_options: Mapping[str, Any] | None = None,
    engine_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Callable[[], Engine]:
    """Return what makes an engine with the weights of a model folder, in this process or, pickled, in another.

    Args:
        name: of the kind of engine, which is no server.
        device: such as cpu or cuda:0, for kinds that take one.
        max_model_len: longest prompt and completion in tokens, for kinds that take it; None: the kind's default.
        own_options: options of this kind alone, see `EngineKind.own_options`.
        engine_options: the user's options of the engine, see `check_engine_options`.
        options: for any kind, such as dtype, max_num_seqs and eos_token_ids.

    Raises:
        RequestError: there is no such engine, or it has no such option.
    """
    kind = engine_kind(name)
    own_options = own_options or {}
    unknown = sorted(own_options.keys() - kind.own_options)
    if unknown:
        expected = ", ".join(sorted(kind.own_options)) or "none"
        raise RequestError(
            f"own_options is {unknown} for engine {name!r}; expected some of {expected}"
        )
    options |= own_options
    options |= _engine_keywords(kind, engine_options or {})
    if kind.takes_device:
        options["device"] = device
    if kind.takes_max_model_len and max_model_len is not None:
        options["max_model_len"] = max_model_len
    if kind.is_own:
        return partial(_make_engine_of_file, str(Path(name).absolute()), model, **options)
    return partial(kind.load().from_pretrained, model, **options)


def check_engine_options(name: str, engine_options: Mapping[str, Any]) -> None:
    """Check the user's options of an engine: of `hf` and of a user's own, its keywords; of others, of its library too.

    Where the library is installed, names that it does not have are refused.

    Raises:
        RequestError: gcore gives an option itself, or there is none of this name; begins with ``engine_options``.
    """
    kind = engine_kind(name)
    library_names = [option for option in engine_options if option not in kind.engine_options]
    accepted: Collection[str] | None = None
    if kind.library_options == "engine_args":
        accepted = vllm_names()
    elif kind.library_options == "server_args":
        accepted = sglang_names(str(engine_options.get("server_python", "")))
    elif library_names and not kind.is_own:
        expected = ", ".join(sorted(kind.engine_options)) or "none"
        raise RequestError(
            f"engine_options has {library_names[0]!r}; expected some of {expected} with engine {name!r}"
        )
    unfit = find_unfit_option(library_names, reserved=kind.reserved_options, accepted=accepted)
    if unfit is not None:
        option, expected = unfit
        raise RequestError(
            f"engine_options has {option!r}; expected {expected} with engine {name!r}"
        )


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


def _engine_keywords(kind: EngineKind, engine_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's options as keywords of ``from_pretrained``."""
    if kind.is_own:
        return dict(engine_options)
    keywords: dict[str, Any] = {}
    library_options: dict[str, Any] = {}
    for name, value in engine_options.items():
        if name in kind.engine_options:
            keywords[name] = value
        else:
            library_options[name] = value
    if library_options and kind.library_options == "server_args":
        keywords["server_args"] = as_server_args(library_options)
    elif library_options:
        keywords[kind.library_options] = library_options
    return keywords


def _make_engine_of_file(spec: str, model: str | Path, **options: Any) -> Engine:
    """Make an engine of the user's; its file is imported in the process that runs the engine."""
    return load_function(spec, setting="engine")(model, **options)


def check_servers(
    name: str,
    urls: Sequence[str],
    model: Path,
    *,
    max_length: int | None = None,
    length_settings: str = "max_length",
) -> None:
    """Ask every server which model it runs, as far as it reports that.

    Args:
        model: folder of the model that the servers should run.
        max_length: longest prompt and response together, in tokens; None: unknown.
        length_settings: the settings that it comes from, for errors.

    Raises:
        RequestError: rope_type ``longrope``, whose factors this kind of server chooses by each batch; begins with the
            field ``engine``.
        RolloutError: a server does not answer, or runs another model, one that takes fewer tokens, or one whose rotary
            embeddings it computes for another length than the trainer does.
    """
    from gcore_rollout.engines.servers.client import ServerClient

    lengths: dict[str, int | None] = {}
    for url in urls:
        try:
            served = ServerClient(url, timeout_s=30.0).call_blocking("GET", "/v1/models")["data"][0]
        except EngineDiedError as error:
            raise RolloutError(f"no {name} answers at {url}: {error}") from error
        root = Path(served.get("root") or "")
        theirs = root / "config.json"
        if theirs.is_file() and _read_essentials(theirs) != _read_essentials(model / "config.json"):
            raise RolloutError(f"the server at {url} runs {root}; expected {model}")
        length = served.get("max_model_len")
        if None not in (max_length, length) and length < max_length:
            raise RolloutError(
                f"the server at {url} takes {length} tokens; expected at least {length_settings} = {max_length}"
            )
        lengths[url] = length
    if max_length is None or not urls:
        return
    from transformers import AutoConfig

    rope: Any = (
        getattr(AutoConfig.from_pretrained(model).get_text_config(), "rope_parameters", None) or {}
    )
    if rope.get("rope_type") != "longrope":
        return
    if engine_kind(name).has_rope_of_batch:
        raise RequestError(
            f"engine is {name!r}; expected hf, vllm or vllm_server for rope_type 'longrope': it chooses its factors by "
            "the longest sequence of each batch"
        )
    original: int = rope["original_max_position_embeddings"]
    for url, length in lengths.items():
        if length is not None and (length > original) != (max_length > original):
            raise RolloutError(
                f"the server at {url} has max_model_len {length}; expected at most {original}: rope_type 'longrope' "
                f"has other factors above, and {length_settings} = {max_length} is not"
            )


def eos_token_ids(folder: Path) -> list[int]:
    """Return the tokens that a model's generation settings declare as ends of a sequence."""
    from transformers import AutoConfig, GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder))
    eos: int | list[int] | None = generation.eos_token_id
    return [eos] if isinstance(eos, int) else list(eos or [])


def _read_essentials(config_json: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(config_json.read_text())
    return {name: value for name, value in settings.items() if name not in _NOTES}
