"""Adapts a patched model to a longer context.

    accelerate launch scripts/finetune.py                             # the embedded Llama, a few minutes of CPU
    accelerate launch scripts/finetune.py --model MODEL --patch yarn:scale=16 --text books --output_dir longer
    accelerate launch --config_file scripts/configs/fsdp2.yaml scripts/finetune.py ...

Every option of transformers' TrainingArguments works; the same command goes on where it was stopped or killed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer, set_seed

from hf_posenc.cli.console import one_line_warnings, print_error
from hf_posenc.cli.inputs import source_of
from hf_posenc.cli.loading import embedded_model, load_model, load_tokenizer, one_thread
from hf_posenc.errors import PosencError
from hf_posenc.training.arguments import (
    DataArguments,
    FinetuneArguments,
    PatchArguments,
    parse_arguments,
)
from hf_posenc.training.checkpoints import (
    SafeCheckpoints,
    clear_partial,
    last_complete_checkpoint,
)
from hf_posenc.training.collator import PositionCollator
from hf_posenc.training.data import prepare_blocks
from hf_posenc.training.interruption import SaveOnSignal
from hf_posenc.training.loss import chunk_loss
from hf_posenc.training.parameters import choose_parameters
from hf_posenc.training.positions import DRAWS
from hf_posenc.training.preparation import apply_patch, resolve_lengths
from hf_posenc.training.sources import STANDARD_LIBRARY, read_standard_library
from hf_posenc.training.watching import Lines, StopOnNonFinite

RECIPE = Path(__file__).parent / "recipes" / "embedded.yaml"


def main() -> None:
    """Reads the command line, and turns what goes wrong into one line."""
    try:
        with one_line_warnings():
            finetune(*parse_arguments(RECIPE))
    except PosencError as error:
        print_error(str(error))
        sys.exit(2)


def finetune(choice: PatchArguments, data: DataArguments, arguments: FinetuneArguments) -> None:
    """From a checkpoint to one that reads longer texts."""
    if choice.model is None:
        one_thread()
    name = choice.model or embedded_model()
    output = Path(arguments.output_dir or ".")
    tokenizer = load_tokenizer(choice.tokenizer or name)
    model = load_model(name, dtype=choice.dtype, device="cpu", attention=choice.attn)
    apply_patch(model, choice.patch, data.target_length)
    lengths = resolve_lengths(
        model,
        positions=data.positions,
        target_length=data.target_length,
        block_length=data.block_length,
    )
    set_seed(arguments.seed)  # a LoRA is drawn before the Trainer sets the seed
    model = choose_parameters(
        model,
        choice.train,
        lora_rank=choice.lora_rank,
        lora_alpha=choice.lora_alpha,
        lora_dropout=choice.lora_dropout,
    )
    if choice.loss_chunk != 0:
        chunk_loss(model, choice.loss_chunk)
    collator = PositionCollator(
        data.positions,
        target_length=lengths.target if data.positions in DRAWS else None,
        seed=arguments.seed,
    )
    entries, source = training_text(data)
    blocks = prepare_blocks(
        entries,
        tokenizer,
        length=lengths.block,
        positions=data.positions,
        limit=data.documents,
        cache=output / "blocks",
        source=source,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=blocks.dataset,
        data_collator=collator,
        processing_class=tokenizer,
        callbacks=[collator, SafeCheckpoints(), SaveOnSignal(), StopOnNonFinite(), Lines()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    with arguments.main_process_first():
        clear_partial(output)
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(output))
    trainer.save_model()


def training_text(data: DataArguments) -> tuple[Any, dict[str, Any]]:
    """The documents to train on, and what a result says of them."""
    entries, source = source_of(
        data.text,
        data.dataset,
        data.dataset_config,
        data.split,
        data.column,
        data.streaming,
        data.tokenized,
    )
    if entries is None:
        return read_standard_library(), STANDARD_LIBRARY
    return entries, source


if __name__ == "__main__":
    main()
