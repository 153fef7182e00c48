"""Losses of policies, critics and pairs of responses, as functions of tensors."""
