"""The acceptance run on one GPU: `scripts/gpu/accept --help`.

The process of the command imports neither torch nor gcore; each part runs in a process of its own.
"""
