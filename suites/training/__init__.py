"""Workloads of the training family."""
