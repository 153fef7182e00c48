"""Every claim gcore makes, measured against a peer or a physical limit."""
