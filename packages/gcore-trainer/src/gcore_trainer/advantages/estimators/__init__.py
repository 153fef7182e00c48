"""Built-in advantage estimators, a file for each; `gcore_trainer.advantages.estimator` says what one declares."""
