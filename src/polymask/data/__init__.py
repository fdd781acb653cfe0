"""Images of a domain: sources, cuts, checks, and batches that are the same every time."""
