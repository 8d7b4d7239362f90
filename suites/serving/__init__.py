"""Workloads of the serving family."""
