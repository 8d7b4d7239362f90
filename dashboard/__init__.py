"""Streamlit pages over the history, and the snapshot for people without Python. Imports no torch."""
