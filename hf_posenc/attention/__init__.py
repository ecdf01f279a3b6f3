"""The attention engine: exact attention with several rotary bands or a distance bias, in memory O(length)."""
