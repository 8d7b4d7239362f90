"""The measuring room: declares pairs, checks them, times them, records and judges."""
