"""Fine-tune a patched model for a longer context.

    accelerate launch scripts/finetune.py                             # the embedded Llama, a few minutes of CPU
    accelerate launch scripts/finetune.py --model MODEL --patch yarn:scale=16 --text books --score_text held_out
    accelerate launch --config_file scripts/configs/fsdp2.yaml scripts/finetune.py ...

Every option of transformers' TrainingArguments works. The same command resumes a stopped or killed run. The parts are
in `hf_posenc.training` and work alone; scripts/finetune_loop.py assembles them in a bare accelerate loop.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from transformers import Trainer, set_seed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

from hf_posenc import PosencError, get_patch, training
from hf_posenc.cli import loading
from hf_posenc.cli.console import one_line_warnings, print_error
from hf_posenc.cli.loading import EMBEDDED
from hf_posenc.evaluation.measuring.identity import weights_hash
from hf_posenc.training import checks
from hf_posenc.training.folder import settings_of
from hf_posenc.training.scoring import precision_of
from scripts import finetune_callbacks as callbacks
from scripts import finetune_documents as documents
from scripts import finetune_model
from scripts import finetune_options as options
from scripts import finetune_result as result

RECIPE = Path(__file__).parent / "recipes" / "embedded.yaml"


def main() -> None:
    """Parse the command line, fine-tune, and print errors in one line."""
    checks.join_on_cpu()
    try:
        with one_line_warnings():
            finetune(options.parse_arguments(RECIPE))
    except PosencError as error:
        print_error(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        print_error(
            "Interrupted. The same command resumes from the last checkpoint; SIGTERM saves one."
        )
        sys.exit(130)


def finetune(parsed: options.Arguments) -> None:
    """Patch, train, score and save a model."""
    choice, data, arguments = parsed
    checks.check_launch(arguments)  # fewer processes than requested, sharding that is not done
    if choice.model is None:
        loading.one_thread()
    name, output = choice.model or loading.embedded_model(), Path(arguments.output_dir or ".")
    tokenizer = loading.load_tokenizer(choice.tokenizer or name)
    dtype = finetune_model.loading_dtype(name, choice.dtype, arguments)
    with finetune_model.whole_weights(arguments):  # a patch is verified on all of them
        model = loading.load_model(name, dtype=dtype, device="cpu", attn=choice.attn)
    loaded = weights_hash(model)
    set_seed(arguments.seed)  # for random parameters of a patch or a LoRA
    finetune_model.apply_patch(model, choice.patch, data.target_length)
    patch = get_patch(model)
    if arguments.verify_export:
        result.check_verifiable(patch, choice.train)
    lengths = finetune_model.resolve_lengths(
        model, data.positions, data.target_length, data.block_length, data.curriculum
    )
    prompt = options.prompt_ids(data, tokenizer, lengths.block)
    finetune_model.check_short(lengths, choice.distill)
    hub, repository = result.Hub.taken_from(arguments), "PATH"
    if hub is not None and arguments.process_index == 0:
        repository = hub.create()  # a wrong token fails before the training

    documents.check_used(data)
    scores, held_out = None, list[str]()
    if data.score:
        with documents.held_out_text(data) as texts:
            scores = training.Scores(
                tokenizer,
                texts,
                lengths=data.score_lengths or [lengths.original, lengths.target],
                output=output / "scores",
                limit=data.score_documents,
                device=None if finetune_model.will_be_sharded(arguments) else arguments.device,
                autocast=precision_of(arguments),
                tail_tokens=data.tail_tokens,
            )
        if documents.holds_out(data):
            held_out = [document.name for document in scores.documents]
    callbacks.check_best(arguments, scores)
    blocks, source = documents.training_blocks(
        data,
        tokenizer,
        lengths.block - len(prompt),
        cache=output / "blocks",
        seed=arguments.seed,
        held_out=held_out,
    )
    finetune_model.check_enough(blocks, arguments)
    if arguments.process_index == 0:
        print(blocks.counts.line())
        if held_out:
            print(f"Held out to be scored: {', '.join(held_out)}")
    collator = training.PositionCollator(
        data.positions,
        target_length=lengths.target if lengths.drawn else None,
        curriculum=lengths.curriculum,
        seed=arguments.seed,
        flatten=finetune_model.needs_one_row(model, data.positions),
        terminal_prompt=prompt,
    )
    training.check_dependencies(model, collator, largest=blocks.counts.largest)
    teacher, sharded = None, finetune_model.will_be_sharded(arguments)
    if choice.distill == "short":
        teacher = training.unpatched_teacher(model, choice.train)
    if scores is not None and None not in (choice.patch, patch) and not sharded:
        scores.measure(training.unpatched_teacher(model, "encoding"))
        if not getattr(model, "is_quantized", False):
            model.to(arguments.device)  # where its weights are now

    lora = {"lora_rank": choice.lora_rank, "lora_alpha": choice.lora_alpha}
    model = training.choose_parameters(
        model, choice.train, **lora, lora_dropout=choice.lora_dropout
    )
    if choice.distill is not None:
        training.distill(
            model,
            positions=data.positions,
            weight=choice.distill_weight or 1.0,
            teacher=teacher,
            chunk=choice.loss_chunk,
        )
    elif choice.loss_chunk != 0:
        training.chunk_loss(model, choice.loss_chunk)
    training.check_run(model, positions=data.positions, arguments=arguments)
    finetune_model.partition_weights(model, arguments)

    settings = settings_of(arguments, **options.decisive(parsed, loaded, patch, lengths, blocks))
    with training.TrainingFolder(arguments, settings, fresh=arguments.fresh) as folder:
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=blocks.dataset,
            eval_dataset=[],  # the scores are the evaluation
            data_collator=collator,
            processing_class=tokenizer,
            callbacks=[collator, callbacks.RunTime(), callbacks.StopOnNonFinite()],
        )
        if scores is not None:
            trainer.add_callback(training.PerplexityCallback(scores, trainer))
        folder.train(trainer)
        table = None
        if scores is not None:
            state, tuned = trainer.state, trainer.model or model
            best = arguments.load_best_model_at_end and state.best_global_step
            seen = None if best else state.num_input_tokens_seen
            table = scores.measure(tuned, best or state.global_step, tokens_seen=seen, last=True)
        log = training.TrainingLog.of(
            trainer,
            base=choice.model or EMBEDDED,
            train=choice.train,
            data={"source": source, **options.described(data, lengths, blocks)},
            command=options.command_line(),
        )
        write = partial(result.write_result, verify=arguments.verify_export, name=repository)
        folder.save(lambda path: write(path, trainer, log, table))
    if arguments.process_index == 0:
        result.print_report(table, output)
        if hub is not None:
            hub.push(output)


if __name__ == "__main__":
    main()
