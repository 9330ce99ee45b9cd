"""Hold conversations: prompts and environments on one side, trajectories on the other."""
