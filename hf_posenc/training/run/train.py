"""One fine-tuning, from its options to a saved model with its card; or what it would cost."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, Trainer, set_seed

from hf_posenc.evaluation.measuring.identity import weights_hash
from hf_posenc.evaluation.options import ModelOptions
from hf_posenc.evaluation.scoring.estimate import read_shape
from hf_posenc.patch.patching import get_patch
from hf_posenc.training import callbacks, checks, loading
from hf_posenc.training.batches.blocks import Blocks
from hf_posenc.training.batches.collator import PositionCollator
from hf_posenc.training.batches.dependencies import check_dependencies
from hf_posenc.training.chunked_loss import chunk_loss, default_chunk
from hf_posenc.training.distillation import distill, unpatched_teacher
from hf_posenc.training.folder import TrainingFolder, settings_of
from hf_posenc.training.log import TrainingLog, checkpoints_activations
from hf_posenc.training.parameters import choose_parameters
from hf_posenc.training.run import arguments as given
from hf_posenc.training.run import documents, estimate, result
from hf_posenc.training.run import model as models
from hf_posenc.training.scoring import Scores, precision_of


def finetune(parsed: given.Arguments) -> None:
    """Patch, train, score and save a model; with `--dry-run`, print the cost instead."""
    choice, data, arguments = parsed
    checks.check_launch(arguments)  # fewer processes than requested, sharding that is not done
    if choice.model is None:
        loading.one_thread()
    loading.quiet_transformers()
    if arguments.dry_run:
        _print_cost(parsed)
        return
    name, output = choice.model or loading.embedded_model(), Path(arguments.output_dir)
    tokenizer = loading.load_tokenizer(choice.tokenizer or name)
    dtype = models.loading_dtype(name, choice.dtype, arguments)
    with models.whole_weights(arguments):  # a patch is verified on all of them
        model = loading.load_model(name, dtype=dtype, device="cpu", attn=choice.attn)
    loaded = weights_hash(model)
    set_seed(arguments.seed)  # for random parameters of a patch or a LoRA
    lengths, prompt = _patched(parsed, model, tokenizer)
    patch = get_patch(model)
    if arguments.verify_export:
        result.check_verifiable(patch, choice.train)
    hub, repository = result.Hub.taken_from(arguments), "PATH"
    if hub is not None and arguments.process_index == 0:
        repository = hub.create()  # a wrong token fails before the training

    scores, held_out, blocks, source = _texts(parsed, tokenizer, lengths, len(prompt), output)
    models.check_enough(blocks, arguments)
    if arguments.process_index == 0:
        print(blocks.counts.line())
        if held_out:
            print(f"Held out to be scored: {', '.join(held_out)}")
    collator = PositionCollator(
        data.positions,
        target_length=lengths.target if lengths.drawn else None,
        curriculum=lengths.curriculum,
        seed=arguments.seed,
        flatten=models.needs_one_row(model, data.positions),
        terminal_prompt=prompt,
    )
    check_dependencies(model, collator, largest=blocks.counts.largest)
    teacher, sharded = None, models.will_be_sharded(arguments)
    if choice.distill == "short":
        teacher = unpatched_teacher(model, choice.train)
    if scores is not None and None not in (choice.patch, patch) and not sharded:
        scores.measure(unpatched_teacher(model, "encoding"))
        if not getattr(model, "is_quantized", False):
            model.to(arguments.device)  # where its weights are now

    model = _trained(choice, model)
    if choice.distill is not None:
        weight, chunk = choice.distill_weight or 1.0, choice.loss_chunk
        distill(model, positions=data.positions, weight=weight, teacher=teacher, chunk=chunk)
    elif choice.loss_chunk != 0:
        chunk_loss(model, choice.loss_chunk)
    checks.check_run(model, positions=data.positions, arguments=arguments)
    models.partition_weights(model, arguments)

    settings = settings_of(arguments, **given.decisive(parsed, loaded, patch, lengths, blocks))
    with TrainingFolder(arguments, settings, fresh=arguments.fresh) as folder:
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=blocks.dataset,
            eval_dataset=[],  # the scores are the evaluation
            data_collator=collator,
            processing_class=tokenizer,
            callbacks=[collator, callbacks.RunTime(), callbacks.StopOnNonFinite()],
        )
        if sys.stderr.isatty() and not arguments.disable_tqdm:
            trainer.remove_callback(ProgressCallback)
            trainer.add_callback(callbacks.LossBar())
        if scores is not None:
            trainer.add_callback(callbacks.PerplexityCallback(scores, trainer))
        folder.train(trainer)
        table = None
        if scores is not None:
            state, tuned = trainer.state, trainer.model or model
            best = arguments.load_best_model_at_end and state.best_global_step
            seen = None if best else state.num_input_tokens_seen
            table = scores.measure(tuned, best or state.global_step, tokens_seen=seen, last=True)
        log = TrainingLog.of(
            trainer,
            base=choice.model or loading.EMBEDDED,
            train=choice.train,
            data={"source": source, **given.described(data, lengths, blocks)},
            command=given.command_line(arguments),
        )
        write = partial(result.write_result, verify=arguments.verify_export, name=repository)
        folder.save(lambda path: write(path, trainer, log, table))
    if arguments.process_index == 0:
        result.print_report(table, output)
        texts = data.score_text or held_out
        result.print_next(output, texts, data.score_lengths or [lengths.original, lengths.target])
        if hub is not None:
            hub.push(output)


def _patched(
    parsed: given.Arguments, model: Any, tokenizer: Any
) -> tuple[models.Lengths, list[int]]:
    """Patch a model; return the lengths of the run, and the tokens of the terminal prompt."""
    choice, data, _ = parsed
    models.apply_patch(model, choice.patch, data.target_length)
    lengths = models.resolve_lengths(
        model, data.positions, data.target_length, data.block_length, data.curriculum
    )
    models.check_short(lengths, choice.distill)
    return lengths, given.prompt_ids(data, tokenizer, lengths.block)


def _texts(
    parsed: given.Arguments,
    tokenizer: Any,
    lengths: models.Lengths,
    prompt: int,
    output: Path | None,
) -> tuple[Scores | None, list[str], Blocks, dict[str, Any]]:
    """Return the scores, the names of documents that are held out, the blocks, and the description of the texts.

    Without an output nothing is written.
    """
    _, data, arguments = parsed
    scores, held_out = None, list[str]()
    if data.score:
        with documents.held_out_text(data) as texts:
            scores = Scores(
                tokenizer,
                texts,
                lengths=data.score_lengths or [lengths.original, lengths.target],
                output=output and output / "scores",
                limit=data.score_documents,
                device=None if models.will_be_sharded(arguments) else arguments.device,
                autocast=precision_of(arguments),
                tail_tokens=data.tail_tokens,
            )
        if documents.holds_out(data):
            held_out = [document.name for document in scores.documents]
    callbacks.check_best(arguments, scores)
    blocks, source = documents.training_blocks(
        data,
        tokenizer,
        lengths.block - prompt,
        cache=output and output / "blocks",
        seed=arguments.seed,
        held_out=held_out,
    )
    return scores, held_out, blocks, source


def _trained(choice: given.PatchArguments, model: Any) -> Any:
    options = {"lora_rank": choice.lora_rank, "lora_alpha": choice.lora_alpha}
    return choose_parameters(model, choice.train, **options, lora_dropout=choice.lora_dropout)


def _print_cost(parsed: given.Arguments) -> None:
    """Print tokens, steps, memory and time of a run, of a model without weights."""
    choice, _, arguments = parsed
    device = arguments.device
    names = {"tokenizer": choice.tokenizer, "dtype": choice.dtype, "attn": choice.attn}
    sizes = ModelOptions(model=choice.model, device=str(device), **names)
    model, tokenizer, name = loading.open_sizes(sizes)
    lengths, prompt = _patched(parsed, model, tokenizer)
    _, _, blocks, _ = _texts(parsed, tokenizer, lengths, len(prompt), None)
    models.check_enough(blocks, arguments)
    shape, chunk = read_shape(model), choice.loss_chunk
    patch, model = get_patch(model), _trained(choice, model)
    step = estimate.step_cost(
        shape,
        [*model.parameters()],
        tokens=lengths.block,
        chunk=default_chunk(model) if chunk is None else chunk or sys.maxsize,
        batch=arguments.train_batch_size,
        accumulation=arguments.gradient_accumulation_steps,
        train=choice.train,
        mixed=precision_of(arguments) is not None,
        checkpointing=checkpoints_activations(arguments),
        optimizer=str(getattr(arguments.optim, "value", arguments.optim)),
        shards=arguments.world_size if models.will_be_sharded(arguments) else 1,
    )
    if arguments.process_index == 0:
        print(f"{name}, {'no patch' if patch is None else str(patch).splitlines()[0]}")
        for line in estimate.lines(step, blocks.counts, lengths.block, arguments, device):
            print(line)
