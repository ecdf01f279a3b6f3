"""Model families and published checkpoints; no mathematics. Found by `hf_posenc.adapters`, never imported by name."""
