"""The pairs: one technique a file, grouped by family."""
