"""Benchmark of gcore-ckpt against its peers and against the speed of memory and disk."""
