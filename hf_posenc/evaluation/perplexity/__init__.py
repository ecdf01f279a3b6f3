"""Perplexity of long documents: protocols, windows, the run and its result."""
