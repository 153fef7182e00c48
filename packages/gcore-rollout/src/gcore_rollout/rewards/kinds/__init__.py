"""The kinds of reward."""
