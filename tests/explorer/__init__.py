"""Explores what happens when managers, sessions, nodes and calls of the platform fail at any moment."""
