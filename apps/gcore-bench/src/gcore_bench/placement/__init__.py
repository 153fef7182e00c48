"""The bench of gcore-placement: balancing, planning, live runs, and the study."""
