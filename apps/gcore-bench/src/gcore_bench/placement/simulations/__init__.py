"""Simulations of placement: the study, and the sweep of loads that change."""
