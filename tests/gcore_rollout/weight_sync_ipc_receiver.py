"""The other process of the test of CUDA IPC: it opens handles, and says what it sees."""

from multiprocessing.connection import Connection

import torch

from gcore_rollout import open_weights


def receive(connection: Connection) -> None:
    tensors = open_weights(connection.recv_bytes())
    seen = [(name, tensor.dtype, tensor.tolist()) for name, tensor in tensors]
    del tensors
    torch.cuda.synchronize()
    connection.send(seen)
