"""The model: its configuration, energies, steps and certificate."""
