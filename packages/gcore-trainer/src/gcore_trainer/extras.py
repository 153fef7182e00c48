"""A check for the optional libraries that settings need, before a model is loaded."""

from collections.abc import Iterable


def check_extras(*, optimizer_names: Iterable[str]) -> None:
    """Import the optional libraries of these settings, as the trainers do after they have loaded their models.

    Args:
        optimizer_names: `OptimizerConfig.name` of each model in training.

    Raises:
        TrainerError: one is not installed.
    """
    if "adamw_8bit" in optimizer_names:
        from gcore_trainer.torch.optimizer import quantised_kernels

        quantised_kernels()
