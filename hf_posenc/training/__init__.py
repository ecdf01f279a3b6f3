"""Training a patched model for a longer context: the parts that scripts/finetune.py is made of."""
