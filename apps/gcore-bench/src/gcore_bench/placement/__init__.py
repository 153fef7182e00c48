"""`gcore-bench placement`: where work runs, beside peers and random."""
