"""The parts that all benches share; apps/gcore-bench/README.md says how a bench is built, with the smallest one."""
