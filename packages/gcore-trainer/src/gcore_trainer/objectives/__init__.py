"""Objectives: what a trainer of language models minimises."""
