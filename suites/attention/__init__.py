"""Workloads of the attention family."""
