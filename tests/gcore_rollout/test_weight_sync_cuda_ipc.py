"""Weights of another process on the same GPU; without one, what is refused."""

import multiprocessing
import pickle

import pytest
import torch
from weight_sync_ipc_receiver import receive

from gcore_rollout import SharedCudaWeights, open_weights


def test_weights_elsewhere_are_refused() -> None:
    with pytest.raises(ValueError, match="weight 'w' is on cpu; expected a CUDA device"):
        SharedCudaWeights([("w", torch.zeros(3))])


def test_a_gpu_that_is_not_seen_is_named() -> None:
    with pytest.raises(ValueError, match="weight 'w' is on GPU 1234: this process sees"):
        open_weights(pickle.dumps([("w", "1234", ())]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_another_process_sees_the_senders_memory() -> None:
    weights = {"w": torch.randn(1000, 64, device="cuda"), "part": torch.arange(100, device="cuda").bfloat16()[10:20]}
    shared = SharedCudaWeights(weights.items())
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=receive, args=(other,))
    process.start()
    own.send_bytes(shared.handles())
    assert own.poll(120)
    seen = own.recv()
    process.join(60)
    shared.close()
    assert process.exitcode == 0
    assert seen == [(name, tensor.dtype, tensor.tolist()) for name, tensor in weights.items()]
