"""What users see of a cluster: the progress of its start, its HTML representation, and words."""
