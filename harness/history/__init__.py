"""The history: append-only records in a folder or an object store, and the questions that are asked of it.

Imports no torch. Recording into a folder needs the standard library alone; the extras ``history`` (DuckDB, PyArrow,
fsspec) and ``s3`` are needed for compacting, for queries, and for object stores.
"""
