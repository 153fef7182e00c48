"""Built-in advantage estimators, a file for each; `gcore_trainer.advantages.estimator` has their interface."""
