"""The scheduler's dashboard at a port of this machine: for a notebook, and for the web UI."""
