"""Speed and memory, measured: `nrgpt bench`."""
