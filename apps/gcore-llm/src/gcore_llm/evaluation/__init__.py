"""Evaluation: sets of prompts, estimators of their scores, and the command that does nothing else."""
