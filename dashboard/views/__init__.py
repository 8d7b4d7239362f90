"""The pages, one a file; each has ``render(view)``."""
