"""One session of the platform: its launch, its status and its end."""
