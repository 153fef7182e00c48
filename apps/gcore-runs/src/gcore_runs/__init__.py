"""The runs of all apps: settings, folder, logs, metrics, display, report, and the supervisor of their training."""

import importlib as _importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gcore_runs.command_line import Command, RunArgs, logs_command, report_command, run_command, run_training
    from gcore_runs.display import Display
    from gcore_runs.errors import UserError, check_at_least, check_finite, check_fraction, one_line
    from gcore_runs.logs.writing import log_to, logged, logs_of
    from gcore_runs.loop.run_loop import RunLoop
    from gcore_runs.loop.supervisor import Supervisor
    from gcore_runs.metrics.writer import MetricsWriter
    from gcore_runs.report import STAGES, Kind, Signal, render_report
    from gcore_runs.run_folder import (
        Result,
        RunFolder,
        append_json,
        open_run,
        read_jsonl,
        write_atomically,
        write_jsonl,
    )
    from gcore_runs.settings.arguments import as_option, setting_types
    from gcore_runs.settings.cluster import PlacementConfig, RayConfig
    from gcore_runs.settings.options import parse, parse_arguments, parse_over
    from gcore_runs.settings.run_config import (
        BaseActorConfig,
        BaseAlgorithmConfig,
        BaseDataConfig,
        BaseRLConfig,
        BaseRunConfig,
        BaseTrainerConfig,
        ScheduleConfig,
        check_one_source,
    )
    from gcore_runs.settings.values import converted, merge, read_toml, resolve, to_toml, validated
    from gcore_runs.weights_files import check_safetensors

_MODULES = {
    "gcore_runs.command_line": "Command RunArgs logs_command report_command run_command run_training",
    "gcore_runs.display": "Display",
    "gcore_runs.errors": "UserError check_at_least check_finite check_fraction one_line",
    "gcore_runs.logs.writing": "log_to logged logs_of",
    "gcore_runs.metrics.writer": "MetricsWriter",
    "gcore_runs.report": "Kind STAGES Signal render_report",
    "gcore_runs.run_folder": "Result RunFolder append_json open_run read_jsonl write_atomically write_jsonl",
    "gcore_runs.loop.run_loop": "RunLoop",
    "gcore_runs.settings.arguments": "as_option setting_types",
    "gcore_runs.settings.cluster": "PlacementConfig RayConfig",
    "gcore_runs.settings.options": "parse parse_arguments parse_over",
    "gcore_runs.settings.run_config": (
        "BaseActorConfig BaseAlgorithmConfig BaseDataConfig BaseRLConfig BaseRunConfig BaseTrainerConfig "
        "ScheduleConfig check_one_source"
    ),
    "gcore_runs.settings.values": "converted merge read_toml resolve to_toml validated",
    "gcore_runs.loop.supervisor": "Supervisor",
    "gcore_runs.weights_files": "check_safetensors",
}
"""The public names by module, which is imported when one of them is first used."""

__all__ = [
    "STAGES",
    "BaseActorConfig",
    "BaseAlgorithmConfig",
    "BaseDataConfig",
    "BaseRLConfig",
    "BaseRunConfig",
    "BaseTrainerConfig",
    "Command",
    "Display",
    "Kind",
    "MetricsWriter",
    "PlacementConfig",
    "RayConfig",
    "Result",
    "RunArgs",
    "RunFolder",
    "RunLoop",
    "ScheduleConfig",
    "Signal",
    "Supervisor",
    "UserError",
    "append_json",
    "as_option",
    "check_at_least",
    "check_finite",
    "check_fraction",
    "check_one_source",
    "check_safetensors",
    "converted",
    "log_to",
    "logged",
    "logs_command",
    "logs_of",
    "merge",
    "one_line",
    "open_run",
    "parse",
    "parse_arguments",
    "parse_over",
    "read_jsonl",
    "read_toml",
    "render_report",
    "report_command",
    "resolve",
    "run_command",
    "run_training",
    "setting_types",
    "to_toml",
    "validated",
    "write_atomically",
    "write_jsonl",
]


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names.split():
            return getattr(_importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
