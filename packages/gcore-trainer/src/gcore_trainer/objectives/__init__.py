"""Objectives that trainers of language models minimise."""
