"""This device: which attention backends are right on it, and how fast methods are, in a layer and in a whole model."""
