"""`hf-posenc finetune` by its former name: `accelerate launch scripts/finetune.py ...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

from hf_posenc.training.__main__ import main

if __name__ == "__main__":
    main()
