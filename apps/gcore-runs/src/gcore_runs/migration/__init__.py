"""The settings of verl and TRL, and those that have their meaning here."""
