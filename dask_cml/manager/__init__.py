"""The code of the process that manages a cluster."""
