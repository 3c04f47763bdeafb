"""Measure speed and memory: `nrgpt bench`."""
