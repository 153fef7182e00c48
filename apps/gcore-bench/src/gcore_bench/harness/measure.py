"""Names of `harness.processes` that the bench of placement imports from here."""

from gcore_bench.harness.processes import measured as measured, settle as settle, status_bytes as status_bytes
