"""Figures, one kind a file: rows in, a Plotly figure out. No Streamlit here."""
