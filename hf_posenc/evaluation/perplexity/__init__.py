"""Perplexity: every candidate on the same tokens."""
