"""Checks of an endpoint that claims token-exact traces of agents: ``gcore-agents conformance``."""
