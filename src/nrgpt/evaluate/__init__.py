"""Evaluation: losses of whole splits, ListOps accuracy, text metrics, tasks of lm-eval."""
