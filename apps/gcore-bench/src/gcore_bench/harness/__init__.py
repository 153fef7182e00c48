"""The parts that all benches share; docs/measurements/own-bench.md says how a bench is built."""
