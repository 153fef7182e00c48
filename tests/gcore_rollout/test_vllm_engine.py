"""What is vLLM's alone: how it is found, what it leaves in the process, and keys and values computed again."""

import ast
import asyncio
import gc
import mmap
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_oracles import (
    VLLM_IMPORT_WARNINGS,
    TinyModel,
    collect,
    engine_args,
    errors,
    make_engine,
    make_request,
    make_tiny_model,
    reference_log_probs,
    until_sampled,
)

from gcore_rollout import EngineModelError, RequestError, RolloutError, VLLMEngine
from gcore_rollout.engines.vllm import engine as vllm_engine

pytestmark = [pytest.mark.slow, *VLLM_IMPORT_WARNINGS]


def test_importing_the_module_does_not_import_vllm() -> None:
    module = ast.parse(Path(vllm_engine.__file__).read_text())
    names = [
        alias.name for node in module.body if isinstance(node, ast.Import) for alias in node.names
    ]
    names += [node.module or "" for node in module.body if isinstance(node, ast.ImportFrom)]
    assert "torch" in names
    assert not any(name.split(".")[0] == "vllm" for name in names)


def test_missing_extra(tied: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(RolloutError, match=r"pip install 'gcore-rollout\[vllm\]'"):
        VLLMEngine.from_pretrained(tied.path)


def test_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineModelError, match=r"no model\.safetensors"):
        VLLMEngine.from_pretrained(tmp_path)


def test_no_sequences_are_refused(tied: TinyModel) -> None:
    with pytest.raises(ValueError, match="max_num_seqs is 0; expected at least 1"):
        VLLMEngine.from_pretrained(tied.path, max_num_seqs=0)


def test_unsupported_head_dimension_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, tie=True, num_heads=8)
    with pytest.raises(EngineModelError, match="head dimension is 16; expected one of"):
        VLLMEngine.from_pretrained(model.path)


async def test_process_is_left_as_it_was(tied: TinyModel) -> None:
    """And several engines may live in it, whichever is closed first."""

    def state() -> tuple[object, ...]:
        return (
            torch.get_rng_state().tolist(),
            repr(np.random.get_state()),
            random.getstate(),
            torch.get_num_threads(),
            torch.set_num_threads,
            [
                os.environ.get(name)
                for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "LOCAL_WORLD_SIZE")
            ],
        )

    # vLLM freezes all objects, and unfreezes them when it ends: what this process has frozen stays so, and no more.
    engine_args()
    gc.freeze()
    num_frozen = gc.get_freeze_count()
    before = state()
    requests = [make_request("r", 5, n=3)]
    first, second = make_engine("vllm", tied), make_engine("vllm", tied)
    assert max(errors(tied.old, requests, await collect(first, *requests))) < 1e-5
    assert state() == before
    assert torch.distributed.is_initialized()
    await first.close()
    assert max(errors(tied.old, requests, await collect(second, *requests))) < 1e-5
    await second.close()
    assert not torch.distributed.is_initialized()
    assert state() == before
    assert 0.99 * num_frozen < gc.get_freeze_count() <= num_frozen


async def test_process_group_of_others_stays(tied: TinyModel, tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        engine = make_engine("vllm", tied)
        await collect(engine, make_request("r", 3))
        await engine.close()
        del engine
        gc.collect()
        torch.distributed.all_reduce(torch.ones(1))
    finally:
        torch.distributed.destroy_process_group()


async def test_kv_computed_again(tied: TinyModel) -> None:
    """After an update, tokens are drawn from what the new weights alone would say; prompts cross a cache block."""
    engine = make_engine("vllm", tied, recompute_kv=True)
    request = make_request("r", 140, n=3, max_tokens=60)
    running = asyncio.create_task(collect(engine, request))
    await until_sampled(engine, 30)
    await engine.update_weights(tied.new.state_dict().items(), version=1)
    for c in (await running).values():
        assert c.weight_versions.tolist() == sorted(c.weight_versions)
        for version, model in ((0, tied.old), (1, tied.new)):
            mine = c.weight_versions == version
            expected = reference_log_probs(model, request, c.token_ids)
            np.testing.assert_allclose(c.log_probs[mine], expected[mine], atol=1e-5, rtol=0)
    await engine.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


async def test_sleep_frees_keys_and_values(tied: TinyModel) -> None:
    engine = VLLMEngine.from_pretrained(
        tied.path, kv_cache_memory_bytes=128 << 20, enable_sleep_mode=True
    )
    requests = [make_request("r", 300, n=4)]
    assert max(errors(tied.old, requests, await collect(engine, *requests))) < 1e-5
    before = resident_bytes()
    await engine.sleep()
    assert before - resident_bytes() > 100 << 20
    await engine.wake()
    # What was cached is gone, and not looked for.
    assert max(errors(tied.old, requests, await collect(engine, *requests))) < 1e-5
    await engine.close()


async def test_more_prompt_tokens_than_fit_in_one_step_and_in_the_cache(tied: TinyModel) -> None:
    """Prompts wait for the next step whole; samples are thrown out for want of memory and computed again."""
    engine = VLLMEngine.from_pretrained(tied.path, kv_cache_memory_bytes=3 << 20, eos_token_ids=[])
    requests = [make_request(f"r{i}", 120, n=2, max_tokens=40) for i in range(10)]
    found = await collect(engine, *requests)
    assert len(found) == 20
    assert max(errors(tied.old, requests, found)) < 1e-5
    # vLLM would sample at 0.01.
    with pytest.raises(
        RequestError, match=r"request 'cold' is 0.001; expected 0 \(greedy\) or 0.01 to 2.0"
    ):
        await collect(engine, make_request("cold", 3, temperature=0.001))
    await engine.close()
