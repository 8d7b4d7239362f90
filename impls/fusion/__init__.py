"""Kernel fusion: fewer bytes through memory for the same mathematics."""
