import os

# Two workers share two cores: with more threads than cores, OpenMP's threads wait for each other longer than they work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
