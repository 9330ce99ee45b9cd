"""Pose tasks that small models learn in minutes."""
