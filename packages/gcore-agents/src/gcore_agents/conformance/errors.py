"""Errors that end a case before its checks."""

from gcore_agents.errors import AgentsError


class MismatchError(AgentsError):
    """An endpoint does not do what a case expects."""


class CaseNotApplicableError(AgentsError):
    """A case says nothing about this endpoint or chat template."""
