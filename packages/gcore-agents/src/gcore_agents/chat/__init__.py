"""Chat templates: messages as tokens, and tokens of a turn as a message."""
