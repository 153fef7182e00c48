"""Options of `gcore-bench diffusion`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self, get_args

from gcore_bench.grpo.errors import BenchError
from gcore_diffusion.demo.digits import PROMPTS

PartName = Literal["loop", "sim"]


@dataclass(frozen=True, kw_only=True)
class DiffusionBenchOptions:
    """Measure gcore-diffusion beside a plain loop on diffusers, and simulate its samplers beside a judge."""

    parts: tuple[PartName, ...] = get_args(PartName)
    """loop: Flow-GRPO-Fast of the embedded model, by gcore-diffusion and by a loop in one process; sim: samplers and a
    vision-language judge of 64 devices, whose verdicts grow."""
    steps: int = 8
    """Of each run that are measured ..."""
    warmup: int = 2
    """... behind so many that are not."""
    rounds: int = 3
    """How often the contenders take turns."""
    prompts: int = 16
    """Of a step."""
    n: int = 16
    """Images of each."""
    sim_steps: int = 60
    """Of the simulated run."""
    seed: int = 0
    """Of the model, the prompts' order, and the simulated lengths."""
    quick: bool = False
    """Two steps of few images, one round: to see that it runs."""
    json: Path | None = None
    """File to write every figure to."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise BenchError("parts is empty: at least one is needed")
        for name, least in (
            ("steps", 1),
            ("warmup", 0),
            ("rounds", 1),
            ("prompts", 8),
            ("n", 2),
            ("sim_steps", 2),
            ("seed", 0),
        ):
            if getattr(self, name) < least:
                raise BenchError(f"{name} is {getattr(self, name)}; expected {least} or more")
        if self.prompts % 8 or self.prompts > len(PROMPTS):
            # Dynamic sampling draws by eights: of other batches, some steps would have nothing to generate.
            raise BenchError(f"prompts is {self.prompts}: a multiple of 8, at most {len(PROMPTS)}, is needed")
        if self.n % 2:
            raise BenchError(f"n is {self.n}: an even number is needed")
        if self.json is not None and not self.json.absolute().parent.is_dir():
            raise BenchError(f"json is {self.json}: {self.json.absolute().parent} is no folder")

    def sized(self) -> Self:
        """With the sizes of ``quick``, if that was asked for."""
        if not self.quick:
            return self
        return replace(self, steps=1, warmup=1, rounds=1, prompts=8, n=2, sim_steps=4)
