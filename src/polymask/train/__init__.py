"""From images to trained domains."""
