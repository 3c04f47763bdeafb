"""Tokenizers, memory-mapped token streams, and the paper's tasks."""
