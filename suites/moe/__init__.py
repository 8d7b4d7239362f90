"""Workloads of the moe family."""
