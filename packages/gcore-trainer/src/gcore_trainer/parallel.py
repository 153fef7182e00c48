"""The sizes by which a trainer's ranks divide its work, and checks that they fit."""

from dataclasses import dataclass, fields

from gcore_trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes under verl's and Megatron's names; what they leave of the world is data parallel."""

    tensor_model_parallel_size: int = 1
    """Ranks that divide each layer's matrices (megatron)."""
    pipeline_model_parallel_size: int = 1
    """Ranks that divide the layers (megatron)."""
    virtual_pipeline_model_parallel_size: int = 1
    """Chunks of layers that each pipeline rank has, interleaved (megatron)."""
    context_parallel_size: int = 1
    """Ranks that divide the tokens of every sequence."""
    ulysses_sequence_parallel_size: int = 1
    """Ranks among these that exchange tokens for attention heads (Ulysses); the others pass keys and values (ring)."""
    expert_model_parallel_size: int = 1
    """Ranks that divide the experts of a mixture of experts (megatron)."""
    sequence_parallel: bool = False
    """Divide the tokens outside attention and MLP over the tensor-parallel ranks (megatron)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "sequence_parallel" and value < 1:
                raise ConfigError(f"{field.name} is {value}; expected 1 or more")
        if self.context_parallel_size % self.ulysses_sequence_parallel_size:
            raise ConfigError(
                f"ulysses_sequence_parallel_size is {self.ulysses_sequence_parallel_size}; expected a divisor of "
                f"context_parallel_size={self.context_parallel_size}"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ConfigError("sequence_parallel is true; expected tensor_model_parallel_size above 1")
        if self.virtual_pipeline_model_parallel_size > 1 and self.pipeline_model_parallel_size == 1:
            raise ConfigError(
                f"virtual_pipeline_model_parallel_size is {self.virtual_pipeline_model_parallel_size}; expected "
                "pipeline_model_parallel_size above 1"
            )

    def check_torch(self) -> None:
        """Check that the torch backend has these sizes.

        Raises:
            ConfigError: a size is one that the torch backend does not have.
        """
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"):
            if (value := getattr(self, name)) > 1:
                raise ConfigError(f"{name} is {value}; expected 1 for the torch backend, or the megatron backend")

    @property
    def ring_size(self) -> int:
        """Ranks that pass keys and values on."""
        return self.context_parallel_size // self.ulysses_sequence_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same samples."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of groups of ranks that work on different samples.

        Raises:
            ConfigError: the sizes do not divide the world.
        """
        if world_size % self.model_parallel_size:
            sizes = " x ".join(
                f"{name}={getattr(self, name)}"
                for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
                if getattr(self, name) > 1
            )
            raise ConfigError(
                f"{sizes} is {self.model_parallel_size}; expected a divisor of the world of {world_size} ranks: "
                f"{self.model_parallel_size * max(1, world_size // self.model_parallel_size)} ranks would fit"
            )
        return world_size // self.model_parallel_size
