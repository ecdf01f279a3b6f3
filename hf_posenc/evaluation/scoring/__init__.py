"""Losses per token without whole logits, in bounded memory, and what that costs."""
