"""Tells a change from noise in a series of runs. Imports no torch."""
