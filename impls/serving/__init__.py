"""Serving: caches, schedulers and an engine."""
