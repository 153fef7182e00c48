"""Python runs this file at its start in every process of the tests, because `tests/conftest.py` puts it on PYTHONPATH.

Importing torch and transformers makes a million objects, none of which is garbage. With Python's own thresholds the
collector walks through them again and again, which is a quarter of such a process's start.
"""

import gc

gc.set_threshold(10_000, 50, 100)
