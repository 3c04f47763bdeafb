"""Losses of whole splits, and ListOps accuracy."""
