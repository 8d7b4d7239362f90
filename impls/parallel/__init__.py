"""Training and decoding over several ranks."""
