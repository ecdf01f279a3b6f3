"""The places where a live model is cut: mechanics only, no model family by name."""
