"""The parts of `python -m jaxrl.report`: what a run folder holds, packed into one HTML page."""
