"""The forward pass as a motion: watching tokens on their energy landscape."""
