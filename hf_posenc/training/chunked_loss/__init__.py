"""Cross-entropy without the logits of a whole batch."""
