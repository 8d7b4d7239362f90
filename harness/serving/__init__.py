"""Serving runs: the traces that feed an engine, and the figures read from its timeline. Imports no torch."""
