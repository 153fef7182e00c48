"""Process groups of Megatron-Core, which a process has one set of, for tests of several layouts."""

from megatron.core import parallel_state

from gcore_trainer.megatron import architecture


def leave_groups() -> None:
    """Forget the groups of an earlier call, which `Rank.leave_other_groups` has destroyed, so that others can be made."""
    if architecture.joined is not None:
        parallel_state.destroy_model_parallel()
        architecture.joined = None
