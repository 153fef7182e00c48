"""Names of `harness.report` that the bench of placement imports from here."""

from gcore_bench.harness.report import (
    BenchError as BenchError,
    BenchOptions as BenchOptions,
    Count as Count,
    NonNegative as NonNegative,
    QuickOptions as QuickOptions,
    at_least as at_least,
)
