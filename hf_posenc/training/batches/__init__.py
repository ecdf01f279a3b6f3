"""Training data: documents as blocks of tokens, positions, and the batches that a model takes."""
