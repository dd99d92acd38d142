"""The code by which a process keeps a cluster: it launches, replaces, retires and stops sessions."""
