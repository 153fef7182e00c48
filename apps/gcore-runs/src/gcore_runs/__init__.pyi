from .command_line import (
    Command as Command,
    RunArgs as RunArgs,
    logs_command as logs_command,
    report_command as report_command,
    run_command as run_command,
    run_training as run_training,
)
from .display import Display as Display
from .errors import (
    UserError as UserError,
    check_at_least as check_at_least,
    check_finite as check_finite,
    check_fraction as check_fraction,
    one_line as one_line,
)
from .logs.writing import log_to as log_to, logged as logged, logs_of as logs_of
from .loop.run_loop import RunLoop as RunLoop
from .loop.supervisor import Supervisor as Supervisor
from .metrics.writer import MetricsWriter as MetricsWriter
from .report import STAGES as STAGES, Kind as Kind, Signal as Signal, render_report as render_report
from .run_folder import (
    Result as Result,
    RunFolder as RunFolder,
    append_json as append_json,
    open_run as open_run,
    read_jsonl as read_jsonl,
    write_atomically as write_atomically,
    write_jsonl as write_jsonl,
)
from .settings.arguments import as_option as as_option, setting_types as setting_types
from .settings.cluster import PlacementConfig as PlacementConfig, RayConfig as RayConfig
from .settings.options import parse as parse, parse_arguments as parse_arguments, parse_over as parse_over
from .settings.run_config import (
    BaseActorConfig as BaseActorConfig,
    BaseAlgorithmConfig as BaseAlgorithmConfig,
    BaseDataConfig as BaseDataConfig,
    BaseRLConfig as BaseRLConfig,
    BaseRunConfig as BaseRunConfig,
    BaseTrainerConfig as BaseTrainerConfig,
    ScheduleConfig as ScheduleConfig,
    check_one_source as check_one_source,
)
from .settings.values import (
    converted as converted,
    merge as merge,
    read_toml as read_toml,
    resolve as resolve,
    to_toml as to_toml,
    validated as validated,
)
from .weights_files import check_safetensors as check_safetensors
