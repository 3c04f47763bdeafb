"""Losses over whole splits, and ListOps accuracy."""
