"""Use gcore-ckpt alone: save while training continues, survive ``kill -9``, load parts, load other shards.

``uv run python examples/checkpoints.py`` takes seconds. It needs torch and no other package of ours.
"""

import os
import signal
import subprocess
import sys
import tempfile

import torch

from gcore_ckpt import Checkpointer, PerRank, Shard, load, verify


def train(folder: str, num_steps: int, *, killed_at: int | None = None) -> torch.Tensor:
    """Train from the latest checkpoint, if there is one, and return the weights [64, 64]."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Checkpointer(folder, keep=2) as checkpointer:
        step = 0
        if checkpointer.steps():
            # The model's own tensors are filled in place; None stands for whatever was saved there.
            template = {
                "model": model.state_dict(),
                "optimizer": None,
                "rng": PerRank(None),
                "step": None,
            }
            saved = checkpointer.load(template)
            optimizer.load_state_dict(saved["optimizer"])
            torch.set_rng_state(saved["rng"])
            step = saved["step"]
            print(f"resumed at step {step}")
        while step < num_steps:
            step += 1
            inputs = torch.randn(16, 64)
            optimizer.zero_grad()
            (model(inputs) - inputs).square().mean().backward()
            optimizer.step()
            if step % 5 == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                # Returns as soon as the tensors are copied; files are written while the next steps run.
                checkpointer.save(
                    step, {**state, "rng": PerRank(torch.get_rng_state()), "step": step}
                )
            if (
                step == killed_at
            ):  # the save of step 15 may be in flight: it is committed whole, or not at all
                os.kill(os.getpid(), signal.SIGKILL)
    return model.weight.detach()


def main() -> None:
    with tempfile.TemporaryDirectory() as interrupted, tempfile.TemporaryDirectory() as whole:
        killed = subprocess.run([sys.executable, __file__, interrupted], check=False)
        print(f"a process that trains was killed by signal {-killed.returncode}")
        weight = train(interrupted, 30)
        print(f"equal to a run without interruption: {torch.equal(weight, train(whole, 30))}")

        verify(interrupted)
        part = load(interrupted, only=["model"])
        print(f"loaded alone: {list(part)}, {tuple(part['model']['weight'].shape)}")

        # Any rank of any number asks for its own box of a tensor: here the second of three ranks, rows 22 to 43.
        rows = Shard(global_shape=(64, 64), offset=(22, 0), tensor=torch.empty(22, 64))
        load(interrupted, {"model": {"weight": rows}})
        print(f"rows 22 to 43 are the same: {torch.equal(rows.tensor, weight[22:44])}")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        train(sys.argv[1], 30, killed_at=17)
    main()
