"""Which method, at which scale, for these documents: successive halving, and a search of factors of its own."""
