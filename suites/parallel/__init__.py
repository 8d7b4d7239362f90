"""Workloads of the parallel family."""
