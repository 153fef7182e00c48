"""Estimators that credit the turns or the tokens of a response one by one."""
