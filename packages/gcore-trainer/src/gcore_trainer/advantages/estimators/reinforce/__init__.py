"""Estimators that compare responses with the whole batch: REINFORCE++ and those like it."""
