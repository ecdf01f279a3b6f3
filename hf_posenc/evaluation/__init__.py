"""Measuring what a method does to long documents. Takes any causal language model, patched or not."""
