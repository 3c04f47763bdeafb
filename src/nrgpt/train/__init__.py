"""Training: one loop for every model, resumable bit for bit."""
