"""Data: tokenizers, memory-mapped token streams, and the tasks of the paper."""
