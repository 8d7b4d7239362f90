"""Workloads as plain data, and the asv classes over them."""
