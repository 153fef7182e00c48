"""`keep_free_memory`: what is freed stays in the C heap, until it is asked for."""

import subprocess
import sys

PROGRAM = """
import ctypes
import resource

import numpy as np

from gcore_runs import keep_free_memory


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        blocks = [np.ones(1 << 21) for _ in range(4)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def pages():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


faults()
default = faults()
keep_free_memory()
faults()
kept, before = faults(), pages()
ctypes.CDLL(None).malloc_trim(0)
print(default, kept, before - pages())
"""


def test_free_memory_is_used_again() -> None:
    """Without page faults; a model that sleeps still returns it."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    default, kept, returned = map(int, done.stdout.split())
    assert default > 5_000
    assert kept < 100
    # Of 64 MiB in pages of 4 KiB.
    assert returned > 10_000
