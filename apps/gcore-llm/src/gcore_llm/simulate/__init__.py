"""`gcore-llm simulate`: the program of `train` in simulated time, on as many modelled devices as are asked for."""
