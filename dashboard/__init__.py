"""Streamlit pages over the history."""
