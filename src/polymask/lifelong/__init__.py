"""Domains that are there already, and change: new classes, and a few images kept for them."""
