"""One fine-tuning, from the words of its command to a saved model with its card; or what it would cost."""

from __future__ import annotations

import dataclasses
import importlib
import shlex
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import accelerator, nn
from transformers import HfArgumentParser, ProgressCallback, Trainer, TrainingArguments, set_seed
from transformers.integrations import integration_utils
from transformers.utils.import_utils import is_torch_xla_available

from hf_posenc.diagnosis import check_causal
from hf_posenc.errors import PosencError, UntrainedWarning, one_line
from hf_posenc.evaluation import loading
from hf_posenc.evaluation.documents.source import Source, source_of
from hf_posenc.evaluation.measuring.candidates import UNPATCHED, Candidate, original_length
from hf_posenc.evaluation.measuring.identity import weights_hash
from hf_posenc.evaluation.options import ModelOptions
from hf_posenc.evaluation.scoring.decoder import position_limit, too_long
from hf_posenc.methods import get_method
from hf_posenc.model.context import length_of
from hf_posenc.patch.patching import get_patch, patch_model, unpatch_model
from hf_posenc.patch.report import Patch
from hf_posenc.training import callbacks, checks, options, processes, result
from hf_posenc.training.blocks import (
    STANDARD_LIBRARY,
    Blocks,
    candidates,
    prepare_blocks,
    read_standard_library,
    without,
)
from hf_posenc.training.checkpoints import TrainingFolder, settings_of
from hf_posenc.training.chunked_loss import chunk_loss
from hf_posenc.training.collator import PositionCollator
from hf_posenc.training.distillation import distill, unpatched_teacher
from hf_posenc.training.estimate import print_cost
from hf_posenc.training.options import HELP, DataArguments, PatchArguments, RunArguments
from hf_posenc.training.parameters import choose_parameters
from hf_posenc.training.scoring import Scores, precision_of


@dataclass
class FinetuneArguments(RunArguments, TrainingArguments):
    """transformers' own options, with our defaults."""

    def __post_init__(self) -> None:
        if self.bf16 and not (accelerator.is_available() or is_torch_xla_available()):
            self.use_cpu = True  # without it, transformers expects a GPU
        super().__post_init__()  # type: ignore[no-untyped-call]
        if self.max_steps == -1 and self.num_train_epochs == 0:
            raise PosencError("--num-train-epochs 0 gives no step: give more, or --max-steps.")
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False  # torch warns that it has no effect there
            if self.fp16:
                raise PosencError("fp16 on a CPU computes in float32 silently: use --bf16 or none.")
        try:
            Trainer.get_optimizer_cls_and_kwargs(self)  # ImportError without its package
        except ValueError as error:
            if "model" not in str(error):  # some are built from the model, which is not loaded yet
                raise
        for tracker in integration_utils.get_reporting_integration_callbacks(self.report_to):
            tracker()  # RuntimeError or ImportError without its package, as late as in the Trainer


class _Parser(options.Parser, HfArgumentParser):
    """The parser of transformers' options, whose errors are one line."""


Arguments = tuple[PatchArguments, DataArguments, FinetuneArguments]


def parse_arguments(words: Sequence[str]) -> Arguments:
    """Parse the words of a command line, and refuse what is wrong with them."""
    options.read(words)
    own: Any = TrainingArguments
    parser = _Parser(own, add_help=False, allow_abbrev=False, conflict_handler="resolve")
    parser.set_defaults(**options.DEFAULTS)
    for name in (name for name, value in options.DEFAULTS.items() if value is True):
        no = options.spellings(f"no_{name}")
        parser.add_argument(*no, action="store_false", dest=name, default=True)
    options.add_options(parser)
    values = vars(options.parse(parser, words))
    choice, data = (options.pick(kind, values) for kind in (PatchArguments, DataArguments))
    try:
        arguments: FinetuneArguments = options.pick(FinetuneArguments, values)
    except PosencError:
        raise
    except (ValueError, ImportError, RuntimeError) as error:  # mutually exclusive options
        raise PosencError(f"{one_line(error).rstrip('.')}. {HELP}") from error
    if choice.distill == "short" and processes.will_be_sharded(arguments):
        raise PosencError(
            "--distill short: no process holds a sharded model whole: leave it out, or FSDP and DeepSpeed."
        )
    return choice, data, arguments


def finetune(parsed: Arguments) -> None:
    """Patch, train, score and save a model; with `--dry-run`, print the cost instead."""
    choice, data, arguments = parsed
    if not (arguments.process_index or sys.stderr.isatty()):
        arguments.disable_tqdm = True  # lines alone; set on all, each machine would print them
    processes.check_launch(arguments)  # fewer processes than requested, sharding that is not done
    if choice.model is None:
        loading.one_thread()
    output = None if arguments.dry_run else Path(arguments.output_dir or ".")
    name, sharded = choice.model or loading.embedded_model(), processes.will_be_sharded(arguments)
    tokenizer = loading.load_tokenizer(choice.tokenizer or name)
    if output is None:
        place = str(arguments.device)
        sizes = ModelOptions(model=name, dtype=choice.dtype, device=place, attn=choice.attn)
        model = loading.open_sizes(sizes)[0]
    else:
        dtype = processes.loading_dtype(name, choice.dtype, arguments)
        check_causal(loading.load_config(name), name, "nothing else is trained here")
        with processes.whole_weights(arguments):  # a patch is verified on all of them
            model = loading.load_model(name, dtype=dtype, device="cpu", attn=choice.attn)
        loaded = weights_hash(model)
    if hasattr(model, "peft_config"):
        way = f"merge it first, by `hf-posenc export {name} --to transformers5`"
        raise PosencError(f"{name} is an adapter, which is not trained further: {way}.")
    set_seed(arguments.seed)  # for random parameters of a patch or a LoRA
    apply_patch(model, choice.patch, data.target_length)
    patch = get_patch(model)
    lengths = resolve_lengths(
        model, data.positions, data.target_length, data.block_length, data.curriculum
    )
    longest = max([lengths.target, *(data.score_lengths if data.score else ())])
    if (limit := position_limit(model)) is not None and longest > limit:
        raise too_long(model, longest, limit)
    if choice.distill == "short" and lengths.block > lengths.original:
        raise PosencError(
            f"--distill short: blocks of {lengths.block:,} tokens are longer than the {lengths.original:,} that the "
            f"unpatched model was trained on. Give --block-length {lengths.original}, or --positions pose."
        )
    prompt = _prompt_ids(data, tokenizer, lengths.block)
    # transformers' flash attention separates packed documents in batches of one row alone.
    one_row = data.positions == "packed" and "flash" in (model.config._attn_implementation or "")
    collator = PositionCollator(
        data.positions,
        target_length=lengths.target,
        curriculum=lengths.curriculum,
        seed=arguments.seed,
        flatten=one_row,
        terminal_prompt=prompt,
    )
    # The Trainer's own pushes would overwrite the card, and save into the folder once more.
    pushes, arguments.push_to_hub, repository = arguments.push_to_hub, False, "PATH"
    if pushes and output is not None and arguments.process_index == 0:
        repository = result.create_repository(arguments)  # a wrong token fails before the training

    # The documents to score, then those to train on.
    source = source_of(data.source(data.text, data.dataset, data.split))
    scores, held_out = None, list[str]()
    spans = data.score_lengths or [lengths.original, lengths.target]
    scored = data.source(data.score_text, data.score_dataset, data.score_split)
    if data.score:
        # Texts that are given, and none to score: some of them are held out.
        taken = not (source.embedded or scored.text or scored.dataset)
        try:
            scores = Scores(
                tokenizer,
                candidates(source) if taken else source_of(scored).read(),
                lengths=spans,
                output=output and output / "scores",
                limit=data.score_documents,
                device=None if sharded else arguments.device,
                autocast=precision_of(arguments),
                tail_tokens=data.tail_tokens,
            )
        except PosencError as error:
            problem = str(error).replace("--lengths", "--score-lengths")
            named = "--" in problem or scored.text or scored.dataset
            others = "" if named else "Give --score-text or --score-dataset. "
            problem = f"No perplexity can be measured: {problem} {others}Or train with --no-score."
            raise PosencError(problem) from error
        if taken:
            held_out = [document.name for document in scores.documents]
    if source.embedded:
        source = Source(read_standard_library, STANDARD_LIBRARY)
    if scores is not None:
        source = without(source, scores.documents, tokenizer, own=bool(held_out))
    if arguments.disable_tqdm or arguments.process_index:
        with suppress(ImportError):  # prepare_blocks names the extra to install
            importlib.import_module("datasets").disable_progress_bars()
    blocks = prepare_blocks(
        source,
        tokenizer,
        length=lengths.block - len(prompt),
        positions=data.positions,
        limit=data.documents,
        cache=output and output / "blocks",
        source=source.about,
    )
    batch = arguments.train_batch_size * arguments.world_size
    if arguments.dataloader_drop_last and len(blocks) < batch:
        raise PosencError(
            f"The text gives {len(blocks):,} blocks, and a batch over all processes has {batch:,}. Give more text, a "
            "smaller --block-length or --per-device-train-batch-size, or --dataloader-drop-last false."
        )
    if arguments.process_index == 0:
        print(blocks.counts.line())
        if held_out:
            print(f"Held out to be scored: {', '.join(held_out)}")
    if output is None:
        print_cost(model, lengths.block, blocks.counts, choice, arguments)
        return
    checks.check_dependencies(model, collator, largest=blocks.counts.largest)
    teacher = unpatched_teacher(model, choice.train) if choice.distill == "short" else None
    if scores is not None and None not in (choice.patch, patch) and not sharded:
        scores.measure(unpatched_teacher(model, "encoding"))
        if not getattr(model, "is_quantized", False):
            model.to(arguments.device)  # where its weights are now

    # What is trained, and its loss.
    lora = {name: getattr(choice, name) for name in ("lora_rank", "lora_alpha", "lora_dropout")}
    model = choose_parameters(model, choice.train, **lora)
    if choice.distill is not None:
        weight, chunk = choice.distill_weight or 1.0, choice.loss_chunk
        distill(model, positions=data.positions, weight=weight, teacher=teacher, chunk=chunk)
    elif choice.loss_chunk != 0:
        chunk_loss(model, choice.loss_chunk)
    checks.check_run(model, positions=data.positions, arguments=arguments)
    processes.partition_weights(model, arguments)

    settings = settings_of(arguments, **_decisive(parsed, loaded, patch, lengths, blocks))
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
        if not arguments.disable_tqdm:
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
        log = result.TrainingLog.of(
            trainer,
            base=choice.model or loading.EMBEDDED,
            train=choice.train,
            data={
                "source": dict(source.about),
                "positions": data.positions,
                "target_length": lengths.target,
                "block_length": lengths.block,
                **({"curriculum": lengths.curriculum} if lengths.curriculum else {}),
                "blocks": len(blocks),
                "documents": blocks.counts.documents,
                "tokens": blocks.counts.tokens,
            },
            command=command_line(arguments),
        )
        folder.save(lambda path: result.write_result(path, trainer, log, table, name=repository))
    if arguments.process_index == 0:
        result.print_report(table, output)
        with processes.whole_weights(arguments):  # one process alone builds a model, for its export
            result.print_next(output, scored, held_out, spans)
        if pushes:
            result.push(output, repository, arguments)


def apply_patch(model: nn.Module, text: str | None, target_length: int | None = None) -> None:
    """Patch a model in place as `--patch` specifies; `None` is for a model that was loaded with its patch.

    Methods without a given scale reach the target length. A patched model is not patched again without `replace=true`.
    """
    patch = get_patch(model)
    saved = f"this model was saved with {str(patch).splitlines()[0]}. Leave --patch out to train it further as it is"
    if text is None and patch is None:
        raise PosencError(
            "The model carries no patch: give --patch, e.g. yarn:scale=4, or --patch none to train it as it is."
        )
    if text is None or text.strip().lower() == UNPATCHED:
        if text is not None and patch is not None:
            raise PosencError(f"--patch none: {saved}.")
        return
    candidate = Candidate.parse(text, unpatched=False)
    beside = dict(candidate.beside)
    replaces = beside.pop("replace", False)
    if patch is not None and not replaces:
        raise PosencError(f"--patch {text}: {saved}, or replace it by replace=true.")
    if patch is not None:
        unpatch_model(model)
        # The checkpoint's own scaling, if it has one, is replaced by frequencies alone.
        if all(get_method(part.method).seam != "rotary" for part in candidate.parts):
            candidate = dataclasses.replace(candidate, beside=beside)
    scale = 1.0
    if candidate.auto_scale:
        original = beside.get("original_max_position_embeddings")
        original = original or length_of(model, replaced=bool(replaces))
        if target_length is None or original is None:
            raise PosencError(f"--patch {text}: give a scale, as in scale=8, or --target-length.")
        scale = max(1.0, target_length / original)
    method, knobs = candidate.arguments(scale)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)  # they are about to be trained
        patch_model(model, method, **knobs)


@dataclass(frozen=True)
class Lengths:
    """The lengths of a run in tokens: the model's original context, the target, and that of an example."""

    original: int
    target: int
    block: int
    curriculum: tuple[int, ...] | None = None  # up to these lengths, one after another


def resolve_lengths(
    model: nn.Module,
    positions: str,
    target_length: int | None = None,
    block_length: int | None = None,
    curriculum: str | None = None,
) -> Lengths:
    """Return the lengths of a run; by default the target is the length that the model's patch reaches.

    A block has that length by default, or the original length if positions are drawn. A curriculum such as "1,2,4,8"
    has rising factors on the original length.
    """
    patch = get_patch(model)
    original = original_length(model, ())
    if (target := target_length or (None if patch is None else patch.extended_length)) is None:
        why = "there is no patch" if patch is None else f"{patch.method} has none"
        raise PosencError(f"No length to train for, since {why}: give --target-length, in tokens.")
    original, drawn = original or target, positions in options.DRAWN
    block = block_length or (min(original, target) if drawn else target)
    if not 1 < block <= target:
        raise PosencError(
            f"--block-length {block}: an example has from 2 to {target:,} tokens, the target length."
        )
    stages = None if curriculum is None else _stages(curriculum, original, target, block)
    return Lengths(original, target, block, stages)


def _stages(curriculum: str, original: int, target: int, block: int) -> tuple[int, ...]:
    """Return the rising lengths of a curriculum; `PositionCollator` checks that they end with the target."""
    given = f"--curriculum {curriculum}"
    try:
        tokens = tuple(float(factor) * original for factor in curriculum.split(","))
        stages = tuple(map(int, tokens))
    except (ValueError, OverflowError):  # no numbers, or none that end
        tokens, stages = (), (0,)
    if stages != tokens or [*stages] != sorted({*stages}):
        raise PosencError(
            f"{given}: give rising factors on the original length, {original:,} tokens, as in 1,2,4,8."
        )
    if stages[0] < block:
        raise PosencError(
            f"{given}: {stages[0]:,} positions are too few for a block of {block:,} tokens. Begin with a larger "
            f"factor, or give --block-length {max(stages[0], 2)}."
        )
    if stages[-1] < target:
        warnings.warn(
            f"{given} ends at {stages[-1]:,} tokens: no step reads positions up to the target of {target:,}. End with "
            f"a factor of {target / original:g}, or give --target-length {stages[-1]}.",
            stacklevel=3,
        )
    return stages


def command_line(arguments: TrainingArguments) -> str:
    """Return the command that repeats the result, without its output folder, a token and the number of processes."""
    words, kept = sys.argv[1:], []
    if words[:1] == ["finetune"]:  # behind hf-posenc
        del words[0]
    while words:
        word = words.pop(0)
        option, equals, _ = word.partition("=")
        if option.replace("-", "_") not in ("__output_dir", "__hub_token"):
            kept.append(word)
        elif not equals and words:
            words.pop(0)
    several = arguments.world_size > 1 or processes.will_be_sharded(arguments)
    program = "accelerate launch -m hf_posenc.training" if several else "hf-posenc finetune"
    return f"{program} {shlex.join(kept)}".rstrip()


def _decisive(
    parsed: Arguments, weights: str, patch: Patch | None, lengths: Lengths, blocks: Blocks
) -> dict[str, Any]:
    """Return everything that determines the losses of a run beside transformers' own options."""
    choice, data, _ = parsed
    names = ("recipe", "model", "tokenizer", "patch")  # weights, tokens and patch count instead
    return {
        "weights": weights,
        "patch": None if patch is None else patch.config.to_dict(),
        "choice": {key: value for key, value in asdict(choice).items() if key not in names},
        "positions": data.positions,
        **({"terminal_prompt": data.terminal_prompt} if data.positions in options.PROMPTED else {}),
        "lengths": {**asdict(lengths), "drawn": data.positions in options.DRAWN},
        "blocks": blocks.counts.sha256,
    }


def _prompt_ids(data: DataArguments, tokenizer: Any, block: int) -> list[int]:
    """Return the tokens of the terminal prompt, which are the last of a block; none without one."""
    if data.positions not in options.PROMPTED:
        return []
    ids = [*map(int, tokenizer(data.terminal_prompt, add_special_tokens=False)["input_ids"])]
    if not 0 < len(ids) <= block - 2:
        raise PosencError(
            f"--terminal-prompt has {len(ids)} tokens; between 1 and {block - 2:,} fit into a block of {block:,} with "
            "its text."
        )
    return ids
