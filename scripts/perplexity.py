"""Perplexity against context length; the same arguments as `hf-posenc perplexity`.

    python scripts/perplexity.py --patch none --patch yarn
    accelerate launch scripts/perplexity.py MODEL --text books --patch none --patch yarn:scale=8 --lengths 4k,8k,32k

Under `accelerate launch` or `torchrun`, every process takes its share of the documents.
"""

import sys

from hf_posenc.cli import main

if __name__ == "__main__":
    main(["perplexity", *sys.argv[1:]])
