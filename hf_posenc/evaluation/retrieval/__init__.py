"""Retrieval: every candidate on the same prompts. Tasks and settings (`tasks`) load without torch."""
