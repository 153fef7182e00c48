"""Training steps, log-probabilities and long sequences under gcore-trainer, beside TRL, verl and the plain forms."""
