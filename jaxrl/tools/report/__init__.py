"""Pack what a run folder holds into one HTML page."""
