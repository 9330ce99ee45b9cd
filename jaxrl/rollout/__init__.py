"""Trajectories: engines that sample, conversations with environments, servers."""
