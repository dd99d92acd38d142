"""What clusters leave on the project file system, and what is done by it."""
