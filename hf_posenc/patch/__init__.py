"""Patches: read from a request, put into a live model, verified, reported, and written into its config."""
