"""The Streamlit dashboard: reads and acts through the services' HTTP APIs only."""
