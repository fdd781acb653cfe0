"""The idea: a domain is a function of the base's weights. Needs torch and numpy only."""
