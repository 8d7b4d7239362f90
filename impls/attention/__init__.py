"""Attention: exact, without the S×S matrix in memory."""
