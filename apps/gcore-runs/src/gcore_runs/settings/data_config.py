"""Settings of data: where rows come from, and how they are mixed and held out."""

from dataclasses import dataclass, field

from gcore_runs.settings.bounds import Checked, Count, NonNegative, Positive


@dataclass(frozen=True, kw_only=True)
class BaseDataConfig(Checked, section="data"):
    """Files of training and held-out rows."""

    train_files: tuple[str, ...] = ()
    """JSONL, Parquet, Arrow or CSV files, patterns such as 'part-*.parquet', or splits on the Hugging Face Hub,
    hf://NAMESPACE/NAME[@REVISION][/SUBSET][:SPLIT]."""
    weights: tuple[Positive, ...] = ()
    """How often each of train-files is drawn from, relative to the others; empty: in proportion to its rows."""
    columns: dict[str, str] = field(default_factory=dict[str, str])
    """Columns to compute from those of a row: --data.columns.NAME and a Jinja expression of them, such as
    "answer.split('####')[-1].strip()"."""
    val_files: tuple[str, ...] = ()
    """Files of held-out rows; empty: data.val-size rows are taken out of the training files."""
    val_size: NonNegative = 64
    """How many rows to hold out if there are no val-files; never more than a tenth of them."""
    train_batch_size: Count = 32
    """Rows a step."""
    shuffle_seed: NonNegative = 0
    """Seed of the order of rows, and of which are held out."""
