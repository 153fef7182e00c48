"""Options of `gcore-bench diffusion`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from gcore_bench.harness.options import Count, NonNegative, QuickOptions
from gcore_diffusion.demo.digits import PROMPTS
from gcore_runs import Bound, at_least, multiple_of

PartName = Literal["loop", "sim"]

_AVAILABLE = Bound(lambda count: count <= len(PROMPTS), f"at most {len(PROMPTS)}, the number of prompts")


@dataclass(frozen=True, kw_only=True)
class DiffusionOptions(QuickOptions):
    """Measure gcore-diffusion against a plain loop on diffusers, and simulate its samplers with a judge."""

    parts: tuple[PartName, ...] = get_args(PartName)
    """loop: Flow-GRPO-Fast of the embedded model, by gcore-diffusion and by a loop in one process; sim: samplers and a
    vision-language judge on 64 devices, whose verdicts grow."""
    steps: Count = 8
    """Measured steps of each run."""
    warmup: NonNegative = 2
    """Steps before those, which no figure includes."""
    # Dynamic sampling draws by eights; with other batches, some steps would have nothing to generate.
    prompts: Annotated[int, at_least(8), multiple_of(8), _AVAILABLE] = 16
    """Prompts of a step."""
    n: Annotated[int, at_least(2), multiple_of(2)] = 16
    """Images of each prompt."""
    sim_steps: Annotated[int, at_least(2)] = 60
    """Steps of the simulated run."""
    seed: NonNegative = 0
    """Seed of the model, the order of the prompts, and the simulated lengths."""

    QUICK: ClassVar[Mapping[str, Any]] = {"steps": 1, "warmup": 1, "rounds": 1, "prompts": 8, "n": 2, "sim_steps": 4}
