"""Describe the work of a job: models, lengths of sequences, and traces of steps."""
