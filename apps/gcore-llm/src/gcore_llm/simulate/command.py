"""The command `gcore-llm simulate`."""

from collections.abc import Sequence

from gcore_runs.errors import UserError
from gcore_runs.settings.parsing import parse_over
from gcore_runs.simulation.command import parse_calibrate, run_calibrate, run_simulation
from gcore_runs.simulation.config import SimulateConfig

_PROG = "gcore-llm simulate"
_DESCRIPTION = """Run the program of train in simulated time, on simulated devices.

Simulated are generation with continuous batching, a reward, training by its FLOPs, and weight sync. The program, its
sampling, balancing and preparation are real, on as many controllers as are asked for.

--config FILE.toml: settings under the same names ([engine] base_s = 0.01); options override them.
--calibrate RUN [RUN ...]: write such a file from the timings of real runs; see --calibrate --help.
"""


def parse_simulate(args: Sequence[str]) -> SimulateConfig:
    """Parse the command line, whose options override those of a TOML file.

    Raises:
        UserError: see `merge`, and `TrainConfig`.
    """
    config = parse_over(SimulateConfig(), args, prog=_PROG, description=_DESCRIPTION)
    from gcore_llm.simulate.run import train_config

    try:
        train_config(config)
    except ValueError as error:
        raise UserError(str(error)) from None
    return config


def run_simulate(args: Sequence[str]) -> None:
    """Run the command."""
    if any(arg.split("=")[0] == "--calibrate" for arg in args):
        choice = parse_calibrate(args, prog=_PROG)
        from gcore_llm.simulate.measured import read_run

        run_calibrate(choice, read_run, prog=_PROG)
        return
    config = parse_simulate(args)
    from gcore_llm.simulate.run import simulate

    run_simulation(config, lambda stepped: simulate(config, stepped))
