"""From a committed step to a state: reading, checking, resharding into a template."""
