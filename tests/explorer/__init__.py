"""Explores what happens when processes, sessions, nodes and calls of the platform fail at any moment."""
