"""The runtimes on which one program runs: tasks of this process, simulated time, local processes, and Ray actors."""
