"""The commands of ``pairbench``, a group a file."""
