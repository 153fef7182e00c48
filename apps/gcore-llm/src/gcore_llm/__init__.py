"""LLM RLHF from one command: a thin app on the gcore packages."""
