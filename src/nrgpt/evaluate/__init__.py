"""Evaluation: text metrics, MMLU and the tasks of lm-eval."""
