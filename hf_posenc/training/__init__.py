"""Training a patched model for a longer context: data, positions, loss, checkpoints; what scripts/finetune.py is made of."""
