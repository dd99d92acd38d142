"""What runs in the process that manages a cluster."""
