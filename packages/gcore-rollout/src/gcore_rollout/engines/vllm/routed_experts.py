"""The experts of a mixture that tokens pass through in vLLM, which its second model runner returns."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def record_experts(engine: Any, *, on_cpu: bool) -> list[int]:
    """Return the layers of an engine's model that have experts, whose choice vLLM returns from here on.

    vLLM does so for its second model runner. On CPU it has the first one, which gets the same parts here: they also
    keep the experts of tokens whose keys and values are cached.
    """
    if on_cpu:
        from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

        engine.engine_core.engine_core.scheduler.aux_output_connector = (
            AuxOutputSchedulerConnector()
        )
        engine.collective_rpc(_connect_runner)
    return engine.apply_model(_list_expert_layers)[0]


def _list_expert_layers(model: torch.nn.Module) -> list[int]:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    return [module.layer_id for module in model.modules() if isinstance(module, MoERunner)]


def _connect_runner(worker: Any) -> None:
    """Have a worker's model runner record experts, and add them to the output of each step."""
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector

    runner = worker.model_runner
    connector = AuxOutputWorkerConnector(
        vllm_config=worker.vllm_config,
        model=runner.get_model(),
        kv_cache_config=runner.kv_cache_config,
    )
    execute_model = runner.execute_model
    sample_tokens = runner.sample_tokens

    def begin_and_execute(scheduler_output: Any, *args: Any) -> Any:
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute_model(scheduler_output, *args)

    def sample_and_collect(grammar_output: Any) -> Any:
        batch = runner.input_batch
        rows: Any = SimpleNamespace(
            req_ids=batch.req_ids,
            num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(batch.req_ids)].copy(),
            query_start_loc_np=runner.query_start_loc.np,
        )
        pending = connector.prepare_output(rows)
        output = sample_tokens(grammar_output)
        # None on ranks other than the first.
        if pending is not None:
            num_sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            # No draft is rejected, because there are none.
            pending.enqueue_cpu_copy(num_sampled, 0 * num_sampled)
            output.aux_output_connector_output = pending.process_output()
        return output

    runner.execute_model = begin_and_execute
    runner.sample_tokens = sample_and_collect
