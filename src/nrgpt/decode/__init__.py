"""Continuing texts: what is kept of earlier tokens, and the choice of the next."""
