"""Fine-tuning in one process or several: `accelerate launch -m hf_posenc.training ...`."""

from __future__ import annotations

from hf_posenc.training.run import main

if __name__ == "__main__":
    main()
