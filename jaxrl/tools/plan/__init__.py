"""Plan what a run will need of its devices, from its config, before anything is loaded."""
