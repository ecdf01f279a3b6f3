"""Fine-tune a patched model for a longer context: the command.

    hf-posenc finetune                                          # the embedded Llama, minutes on a CPU
    hf-posenc finetune --model MODEL --patch yarn:scale=16 --text books --score-text held_out
    accelerate launch --config_file scripts/configs/fsdp2.yaml -m hf_posenc.training ...

Every option of transformers' TrainingArguments works. The same command resumes a stopped or killed run. What it uses of
`hf_posenc.training` also works alone; scripts/finetune_loop.py assembles the parts in a bare accelerate loop.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from hf_posenc.errors import PosencError
from hf_posenc.training import options


def main() -> None:
    """Fine-tune as the words of this process say, and print errors and warnings in one line."""
    warnings.showwarning = lambda message, *_, **__: _print("warning", str(message))
    try:
        run(sys.argv[1:])
    except PosencError as error:
        _print("error", str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        _print("error", "interrupted")
        sys.exit(130)


def run(words: Sequence[str]) -> None:
    """Fine-tune as these words say."""
    options.read(words)  # what is wrong with them is refused before anything heavy is imported
    from hf_posenc.training.processes import join_on_cpu
    from hf_posenc.training.train import finetune, parse_arguments

    join_on_cpu()
    try:
        finetune(parse_arguments(words))
    except KeyboardInterrupt:
        sys.stderr.write("The same command resumes from a saved checkpoint; SIGTERM saves one.\n")
        raise


def _print(kind: str, message: str) -> None:
    sys.stderr.write(f"{kind}: {' '.join(message.split())}\n")


if __name__ == "__main__":
    main()
