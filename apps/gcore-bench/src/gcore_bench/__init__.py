"""Every claim gcore makes, measured beside a peer or a physical limit."""
