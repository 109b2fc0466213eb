"""Who runs next: host integers only, no torch in this folder."""
