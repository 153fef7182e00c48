"""The command of the conformance cases."""
