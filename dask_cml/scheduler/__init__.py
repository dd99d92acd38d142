"""The code that runs in the scheduler's process."""
