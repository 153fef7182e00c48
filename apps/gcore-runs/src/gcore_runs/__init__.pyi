from .command_line import (
    Command as Command,
    RunArgs as RunArgs,
    print_table as print_table,
    run_command as run_command,
    run_training as run_training,
)
from .errors import UserError as UserError
from .host_memory import (
    keep_free_memory as keep_free_memory,
)
from .inputs import (
    build_tokenizer as build_tokenizer,
    check_model as check_model,
    columns as columns,
    hold_out as hold_out,
    image_sources as image_sources,
    mix_sets as mix_sets,
    model_folder as model_folder,
    open_rows as open_rows,
)
from .logs import (
    one_line as one_line,
)
from .loop.recorder import (
    STAGE_CELLS as STAGE_CELLS,
    BaseRunRecorder as BaseRunRecorder,
    Cell as Cell,
    Display as Display,
    RunJob as RunJob,
)
from .loop.supervisor import (
    RunResult as RunResult,
    Supervisor as Supervisor,
    start_inline_backend as start_inline_backend,
)
from .report.run import Kind as Kind
from .run_folder import (
    RunFolder as RunFolder,
    json_object as json_object,
    read_jsonl as read_jsonl,
    write_atomically as write_atomically,
    write_jsonl as write_jsonl,
)
from .settings.checks import (
    Amount as Amount,
    Bound as Bound,
    Checked as Checked,
    Count as Count,
    Fraction as Fraction,
    FractionAbove0 as FractionAbove0,
    NonNegative as NonNegative,
    Positive as Positive,
    ReadWith as ReadWith,
    at_least as at_least,
    one_of as one_of,
)
from .settings.parsing import (
    convert_settings as convert_settings,
    extend_recipes as extend_recipes,
    merge as merge,
    parse as parse,
    parse_arguments as parse_arguments,
    to_toml as to_toml,
)
from .settings.resources import (
    resolve as resolve,
    with_adapter as with_adapter,
)
from .settings.run_config import (
    BaseRLConfig as BaseRLConfig,
    BaseRunConfig as BaseRunConfig,
)
from .settings.sections import (
    BEST_SETTINGS as BEST_SETTINGS,
    AdapterSettings as AdapterSettings,
    BaseAlgorithmConfig as BaseAlgorithmConfig,
    BaseDataConfig as BaseDataConfig,
    BaseOptimConfig as BaseOptimConfig,
    BaseRolloutConfig as BaseRolloutConfig,
    RLTrainerConfig as RLTrainerConfig,
    adapter_settings as adapter_settings,
    schedule_settings as schedule_settings,
)
from .training_ranks import BaseTrainerWorker as BaseTrainerWorker
