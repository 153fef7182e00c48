"""Built-in policy losses, a file for each; `gcore_trainer.losses.policy_loss` says what one is given and returns."""
