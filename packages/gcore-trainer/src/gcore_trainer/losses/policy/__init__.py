"""Built-in policy losses, a file for each; `gcore_trainer.objectives.policy` has their interface."""
