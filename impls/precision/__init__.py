"""Precision: fewer bits for weights, and what that costs."""
