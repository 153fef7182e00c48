"""``python -m gcore_bench`` is the command `gcore-bench`."""

from gcore_bench.cli import main

if __name__ == "__main__":
    main()
