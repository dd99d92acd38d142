"""What runs inside the scheduler's process."""
