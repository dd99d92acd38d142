"""The records of clusters on the project file system, and operations on clusters by their records."""
