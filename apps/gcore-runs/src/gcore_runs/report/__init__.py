"""`report.html`: a run on one page."""

from gcore_runs.report.charts import STAGES
from gcore_runs.report.kinds import Kind, Signal
from gcore_runs.report.page import render_report

__all__ = ["STAGES", "Kind", "Signal", "render_report"]
