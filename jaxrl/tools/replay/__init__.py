"""Make the steps of a recorded run again."""
