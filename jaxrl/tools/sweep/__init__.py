"""Train the same task with several methods and seeds, and say what is known of their difference."""
