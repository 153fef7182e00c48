"""Built-in policy losses, a file for each; `gcore_trainer.objectives.policy` says what one is given and returns."""
