"""Workloads of the fusion family."""
