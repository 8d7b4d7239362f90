"""Mixture of experts: a token passes few of many feed-forward networks."""
