"""One fine-tuning, from its options to a saved model with its card; or what it would cost."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from transformers import ProgressCallback, Trainer, set_seed

from hf_posenc.evaluation import loading
from hf_posenc.evaluation.measuring.identity import weights_hash
from hf_posenc.evaluation.options import ModelOptions
from hf_posenc.patch.patching import get_patch
from hf_posenc.training import callbacks, checks
from hf_posenc.training.batches.collator import PositionCollator
from hf_posenc.training.batches.dependencies import check_dependencies
from hf_posenc.training.chunked_loss import chunk_loss
from hf_posenc.training.distillation import distill, unpatched_teacher
from hf_posenc.training.folder import TrainingFolder, settings_of
from hf_posenc.training.log import TrainingLog
from hf_posenc.training.run import arguments as given
from hf_posenc.training.run import documents, estimate, result
from hf_posenc.training.run import model as models
from hf_posenc.training.scoring import Scores, precision_of


def finetune(parsed: given.Arguments) -> None:
    """Patch, train, score and save a model; with `--dry_run`, print the cost instead."""
    choice, data, arguments = parsed
    checks.check_launch(arguments)  # fewer processes than requested, sharding that is not done
    if choice.model is None:
        loading.one_thread()
    output: Path | None = Path(arguments.output_dir or ".")
    name, sharded = choice.model or loading.embedded_model(), models.will_be_sharded(arguments)
    if arguments.dry_run:
        output, place = None, str(arguments.device)
        sizes = ModelOptions(model=name, dtype=choice.dtype, device=place, attn=choice.attn)
        model = loading.open_sizes(sizes)[0]
    tokenizer = loading.load_tokenizer(choice.tokenizer or name)
    if output is not None:
        dtype = models.loading_dtype(name, choice.dtype, arguments)
        with models.whole_weights(arguments):  # a patch is verified on all of them
            model = loading.load_model(name, dtype=dtype, device="cpu", attn=choice.attn)
        loaded = weights_hash(model)
    set_seed(arguments.seed)  # for random parameters of a patch or a LoRA
    models.apply_patch(model, choice.patch, data.target_length)
    patch = get_patch(model)
    lengths = models.resolve_lengths(
        model, data.positions, data.target_length, data.block_length, data.curriculum
    )
    prompt = given.prompt_ids(data, tokenizer, lengths.block)
    collator = PositionCollator(
        data.positions,
        target_length=lengths.target if lengths.drawn else None,
        curriculum=lengths.curriculum,
        seed=arguments.seed,
        flatten=models.needs_one_row(model, data.positions),
        terminal_prompt=prompt,
    )
    models.check_short(lengths, choice.distill)
    hub, repository = result.Hub.taken_from(arguments), "PATH"
    if hub is not None and output is not None and arguments.process_index == 0:
        repository = hub.create()  # a wrong token fails before the training

    scores, held_out = None, list[str]()
    if data.score:
        with documents.held_out_text(data) as texts:
            scores = Scores(
                tokenizer,
                texts,
                lengths=data.score_lengths or [lengths.original, lengths.target],
                output=output and output / "scores",
                limit=data.score_documents,
                device=None if sharded else arguments.device,
                autocast=precision_of(arguments),
                tail_tokens=data.tail_tokens,
            )
        if documents.holds_out(data):
            held_out = [document.name for document in scores.documents]
    blocks, source = documents.training_blocks(
        data,
        tokenizer,
        lengths.block - len(prompt),
        cache=output and output / "blocks",
        held_out=held_out,
    )
    models.check_enough(blocks, arguments)
    if arguments.process_index == 0:
        print(blocks.counts.line())
        if held_out:
            print(f"Held out to be scored: {', '.join(held_out)}")
    if output is None:
        estimate.print_cost(model, lengths.block, blocks.counts, choice, arguments)
        return
    check_dependencies(model, collator, largest=blocks.counts.largest)
    teacher = None
    if choice.distill == "short":
        teacher = unpatched_teacher(model, choice.train)
    if scores is not None and None not in (choice.patch, patch) and not sharded:
        scores.measure(unpatched_teacher(model, "encoding"))
        if not getattr(model, "is_quantized", False):
            model.to(arguments.device)  # where its weights are now

    model = models.choose(choice, model)
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
        write = partial(result.write_result, name=repository)
        folder.save(lambda path: write(path, trainer, log, table))
    if arguments.process_index == 0:
        result.print_report(table, output)
        spans = data.score_lengths or [lengths.original, lengths.target]
        result.print_next(output, data.score_text or held_out, spans)
        if hub is not None:
            hub.push(output)
