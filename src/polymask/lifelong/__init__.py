"""Domains that are there already: new classes, a few images kept for that, and others that draw on or begin as them."""
