"""Run programs of a model without trusting them, and judge what they print."""
