"""Workloads of the precision family."""
