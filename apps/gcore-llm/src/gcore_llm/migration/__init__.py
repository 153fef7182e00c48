"""Conversion of configs of verl and TRL to settings of this app."""
