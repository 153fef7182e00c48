"""`gcore-bench data`: the start of a run on large data sets, and the memory of their orders."""
