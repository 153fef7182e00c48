"""`report.html`: a run on one page."""

from gcore_llm.report.charts import STAGES
from gcore_llm.report.page import write_report

__all__ = ["STAGES", "write_report"]
