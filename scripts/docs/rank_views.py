"""Be one rank of every recipe of large models: count what it loads, and record what it exchanges with the others.

The other ranks are those of torch's ``fake`` process group, which sends nothing. Models have the shapes of the
`config.json` files that the apps bring, and tensors without memory. Megatron-Core's have memory, because it looks at
numbers to send tokens to experts: that model has two layers.

``python scripts/docs/rank_views.py`` writes the table to docs/recipes.md; with ``--print`` to the terminal.
"""

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionMaskInterface

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/ranks"))

from collectives import Collective, RecordedCollectives
from megatron_groups import leave_groups

import gcore_trainer.megatron.trainer
from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.planning.dry_run import make_denoiser, weight_bytes
from gcore_diffusion.planning.shapes import (
    INPUTS,
    image_shape,
    shape_folder as pipeline_folder,
)
from gcore_diffusion.recipes.published import PUBLISHED
from gcore_llm.config import TrainConfig
from gcore_llm.learning.device_plan import plan_memory
from gcore_llm.recipes.large import LARGE
from gcore_llm.recipes.shapes import shape_folder
from gcore_runs.simulation.forecast import dry_run_device
from gcore_trainer import (
    MegatronTrainer,
    OptimizerConfig,
    PackedModel,
    ParallelConfig,
    Sample,
    SFTObjective,
    TorchParallel,
)
from gcore_trainer.torch.host_memory import local
from gcore_trainer.torch.loading import choose_class
from gcore_trainer.torch.packed_model import ATTENTION_NAME, register

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
ROW = re.compile(r"^\| `(\w+)` \| \d+ of \d+ \|.*\n", re.MULTILINE)
_GB = 1e9
_GPUS_PER_NODE = 8
_NUM_TOKENS = 128
_NUM_LAYERS = 2
_NAMES = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "recv_": "receive",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "allgather_into_tensor_coalesced_": "all-gather",
}
_RECEIVING = ("recv_", "_reduce_scatter_base_", "alltoall_base_")


@dataclass(frozen=True, kw_only=True)
class RankView:
    """What one rank of a recipe loads, and exchanges in a forward and a backward pass."""

    rank: int
    num_ranks: int
    loaded_bytes: int
    """Of the weights of the model in training."""
    planned_bytes: float
    """The same by the plan of the dry run."""
    calls: Sequence[Collective]


def view(name: str) -> RankView:
    """Be a rank of a recipe: the first one, of Megatron-Core's the last one."""
    if name in PUBLISHED:
        return _view_of_images(PUBLISHED[name]())
    # On a machine without a GPU it would be float32.
    config = replace(LARGE[name](), dtype="bfloat16")
    if config.trainer.backend == "megatron":
        return _view_of_megatron(config)
    return _view_of_torch(config)


def rows(name: str, seen: RankView) -> list[str]:
    """Return the lines of a recipe in the table: one for each group and kind of collective."""
    counts: Counter[tuple[tuple[int, ...], str]] = Counter()
    sizes: Counter[tuple[tuple[int, ...], str]] = Counter()
    for call in seen.calls:
        # Pickled objects and counts, such as those of samples, are small.
        if not call.is_object:
            key = (call.ranks, _NAMES.get(call.name, call.name))
            counts[key] += 1
            sizes[key] += call.size_bytes
    weights = f"{seen.loaded_bytes / _GB:.3f}"
    start = [f"`{name}`", f"{seen.rank} of {seen.num_ranks}", weights]
    start.append(f"{seen.planned_bytes / _GB:.3f}")
    if not counts:
        return [_line([*start, "none", "", "", "", ""])]
    lines: list[str] = []
    for (ranks, kind), count in counts.items():
        crosses = len({rank // _GPUS_PER_NODE for rank in ranks}) > 1
        size_mb = f"{sizes[ranks, kind] / 1e6:,.1f}"
        group = [kind, _list_ranks(ranks), "yes" if crosses else "no", str(count), size_mb]
        lines.append(_line(start + group))
    return lines


def _list_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == ranks[-1] - ranks[0] + 1:
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _view_of_torch(config: TrainConfig) -> RankView:
    """Compute a packed sample as a rank of FSDP2 does."""
    folder = shape_folder(config.model)
    size = config.trainer.num_processes
    auto_class, implementations, model_config = choose_class(PackedModel, folder, ATTENTION_NAME)
    with ExitStack() as stack:
        register()
        # Another mask, because gcore's is a subclass, which a tensor without memory cannot become.
        AttentionMaskInterface.register(ATTENTION_NAME, lambda *_, **__: None)
        stack.callback(register)
        stack.enter_context(_fake_ranks(0, size))
        parallel = TorchParallel.join(config.trainer.parallel)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model = auto_class.from_config(
            model_config, dtype=torch.float32, attn_implementation=implementations
        )
        packed = PackedModel(
            model,
            weights=_NoWeights(),
            compute_dtype=torch.bfloat16,
            gradient_checkpointing=True,
        )
        if size > 1:
            parallel.shard(packed)
        loaded_bytes = sum(local(p).nbytes for p in model.parameters())
        with RecordedCollectives() as recorded:
            packed.score([_sample()]).log_probs.sum().backward()
    return RankView(
        rank=0,
        num_ranks=size,
        loaded_bytes=loaded_bytes,
        planned_bytes=_planned_bytes(config, folder),
        calls=recorded.calls,
    )


def _view_of_megatron(config: TrainConfig) -> RankView:
    """Make a step of one sample, whose tokens are dealt evenly to the experts, as the last rank of the last stage.

    What others would send is zero; with numbers that are not finite the update would be left out.
    """
    size = config.trainer.num_processes
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shape = json.loads((shape_folder(config.model) / "config.json").read_text())
        shape["num_hidden_layers"] = _NUM_LAYERS
        (folder / "config.json").write_text(json.dumps(shape))
        stack.enter_context(_fake_ranks(size - 1, size))
        stack.enter_context(mock.patch.object(gcore_trainer.megatron.trainer, "load_weights"))
        trainer = MegatronTrainer(
            folder,
            parallel=config.trainer.parallel,
            optimizer=OptimizerConfig(),
            objective=SFTObjective(),
            dtype=torch.bfloat16,
        )
        stack.callback(leave_groups)
        modules: Any = trainer._module  # pyright: ignore[reportPrivateUsage]  # nothing else has the chunks of the model
        for chunk in modules:
            # All rows are of one length here; otherwise stages send each other their lengths.
            chunk.config.variable_seq_lengths = False
        loaded_bytes = sum(p.nbytes for p in modules.parameters())
        top_k = shape["num_experts_per_tok"]
        first = top_k * np.arange(_NUM_TOKENS)
        experts = (first[:, None] + np.arange(top_k)) % shape["num_experts"]
        routed = np.stack([experts.astype(np.int16)] * _NUM_LAYERS, axis=1)
        with RecordedCollectives() as recorded, _ZerosFromOthers():
            trainer.train_step([[replace(_sample(), routed_experts=routed)]])
        planned_bytes = _planned_bytes(config, folder)
    return RankView(
        rank=size - 1,
        num_ranks=size,
        loaded_bytes=loaded_bytes,
        planned_bytes=planned_bytes,
        calls=recorded.calls,
    )


def _view_of_images(config: DiffusionConfig) -> RankView:
    """Compute an image at one step as a rank of FSDP2 does."""
    folder = pipeline_folder(config.model)
    size = config.trainer.num_processes
    denoiser = make_denoiser(config, folder)
    planned_bytes = weight_bytes(config, denoiser)
    model = denoiser.model
    inputs = INPUTS[type(model).__name__]
    assert config.rollout.image_size is not None
    image = image_shape(folder, config.rollout.image_size, config.rollout.max_sequence_length)
    dtype: torch.dtype = getattr(torch, config.actor.dtype)
    with _fake_ranks(0, size):
        mesh = TorchParallel.join(ParallelConfig()).mesh
        denoiser.shard(mesh)
        # The positions of tokens are constants.
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            loaded_bytes = sum(local(p).nbytes for p in model.parameters())
            with RecordedCollectives() as recorded:
                with torch.autocast("cpu", dtype=dtype):
                    output = model(**inputs(model.config, image, 1), return_dict=False)[0]
                output.float().sum().backward()
    return RankView(
        rank=0,
        num_ranks=size,
        loaded_bytes=loaded_bytes,
        planned_bytes=planned_bytes,
        calls=recorded.calls,
    )


class _NoWeights:
    """The weights of a model whose tensors have no memory: there is nothing to read, and nothing to check."""

    lora = None
    device = torch.device("cpu")

    def fill(self, model: Any) -> None:
        """Leave the parameters as they are."""

    @contextmanager
    def checking(self, packed: Any) -> Generator[None]:
        """Leave out the comparison with transformers' scores."""
        packed._probe = lambda: None
        yield


class _ZerosFromOthers(TorchDispatchMode):
    """Fill what a rank receives, because the fake group leaves the memory of these outputs as it was."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._schema.name.removeprefix("c10d::") in _RECEIVING:
            for output in tree_leaves(args[0]):
                output.zero_()
        return func(*args, **(kwargs or {}))


@contextmanager
def _fake_ranks(rank: int, size: int) -> Generator[None]:
    """Be one of several ranks, whose collectives send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _sample() -> Sample:
    ids = np.arange(_NUM_TOKENS)
    return Sample(prompt_ids=ids[:1], response_ids=ids)


def _planned_bytes(config: TrainConfig, folder: Path) -> float:
    plan = plan_memory(config, folder, dry_run_device("H100"))
    return plan.roles["trainer"]["weights"]


if __name__ == "__main__":
    table = "".join(row for name in [*LARGE, *PUBLISHED] for row in rows(name, view(name)))
    if sys.argv[1:] == ["--print"]:
        print(table, end="")
        sys.exit()
    text = PAGE.read_text()
    first = ROW.search(text)
    assert first is not None
    before, after = text[: first.start()], ROW.sub("", text[first.start() :])
    PAGE.write_text(before + table + after)
