"""Evaluation: ListOps accuracy, losses over whole splits."""
