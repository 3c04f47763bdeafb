"""Models from elsewhere: the authors' checkpoints, and GPT-2 in both directions."""
