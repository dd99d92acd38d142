"""One session of the platform: how it is launched, watched and stopped."""
