"""Techniques of a foreign package: small, and some of them broken on purpose."""
