"""Many domains at once, on one base."""
