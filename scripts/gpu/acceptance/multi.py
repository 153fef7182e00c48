"""Part 14: several processes on one device; each check runs in processes of its own, with a time limit."""

from contextlib import suppress
from importlib import import_module

from acceptance import agreement, failures, layouts
from acceptance.layouts import LAYOUTS, Layout
from acceptance.ranks import run
from acceptance.trial import Trial

_AIMS = {
    "float32": {"loss": 1e-4, "norm": 1e-4, "weights": 1e-5},
    "bfloat16": {"loss": 0.02, "norm": 0.05, "weights": 0.016},
}
"""Largest differences from one rank. In bfloat16 weights near 1 are 0.0078 apart."""
_FIGURES = {
    "loss": ("loss", "nats"),
    "norm": ("share of the gradient norm", ""),
    "weights": ("weight", ""),
}
_CHECKS = (agreement.shared_memory, agreement.engine_head, failures.kill, failures.stop)
_CUDA_CHECKS = (
    agreement.cuda_ipc,
    failures.out_of_memory,
    failures.nccl,
    failures.nccl_timeout,
)
_PRELOADED = ("gcore_trainer.megatron.trainer", "torch._dynamo", "torch.distributed.fsdp")
"""Imported once, for all ranks that are forked; an image may lack Megatron-Core."""


def checks(trial: Trial) -> None:
    """Compare layouts with one rank, and check weights and failures of processes that share a device."""
    for module in _PRELOADED:
        with suppress(ImportError):
            import_module(module)
    with trial.attempt("the models"):
        run(trial, layouts.write_models, size=1)
    references = dict.fromkeys(layout.reference for layout in LAYOUTS)
    for layout in (*references, *LAYOUTS):
        with trial.attempt(f"{layout.name} of {layout.size}"):
            _train(trial, layout)
    for check in (*_CHECKS, *_CUDA_CHECKS):
        if check in _CUDA_CHECKS and trial.device != "cuda":
            trial.note(f"{check.__name__}: needs CUDA.")
            continue
        with trial.attempt(check.__name__):
            check(trial)


def _train(trial: Trial, layout: Layout) -> None:
    differences, *_ = run(trial, layouts.train, layout, size=layout.size)
    for dtype, values in differences.items():
        for key, (name, unit) in _FIGURES.items():
            trial.count(
                f"{layout.name} of {layout.size}, {dtype}: largest difference, {name}",
                values[key],
                unit,
                at_most=_AIMS[dtype][key],
            )
