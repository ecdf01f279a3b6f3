"""Losses per token without full logits, in bounded memory, and estimates of their cost."""
