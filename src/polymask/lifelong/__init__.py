"""Domains that are there already: new classes, a few images kept for that, and others that draw on them or begin as they are."""
