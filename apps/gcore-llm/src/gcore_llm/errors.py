"""What ends a run that has begun."""


class RankError(Exception):
    """A training rank failed or died, and with it the training group."""
