"""The training of hf-posenc finetune as a bare accelerate loop, to read and to change: same losses, same resume."""

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, HfArgumentParser, get_scheduler, set_seed

from hf_posenc import embedded, evaluation, from_pretrained, get_patch, patch_model, training
from hf_posenc.patch.config import parse_method
from hf_posenc.training import blocks, checkpoints, collator, processes


@dataclass
class Options:
    """Options of hf-posenc finetune; precision, processes and shards are set by `accelerate launch`."""

    model: str = str(embedded.model_path())
    patch: str = "yarn:scale=4"
    text: str | None = None
    target_length: int | None = None
    positions: str = "contiguous"
    train: str = "full"
    output_dir: str = "finetuned"
    learning_rate: float = 1e-3
    warmup_steps: int = 10
    max_steps: int = 150
    per_device_train_batch_size: int = 2
    gradient_accumulation_steps: int = 1
    save_steps: int = 50
    seed: int = 42
    report_to: str | None = None


def main() -> None:
    """Train; the same command resumes a killed run."""
    processes.join_on_cpu()
    (run,) = HfArgumentParser(Options, allow_abbrev=False).parse_args_into_dataclasses()  # type: ignore[arg-type]
    set_seed(run.seed)  # every process draws the same patch and adapter
    model = from_pretrained(run.model, dtype=torch.float32)
    method, settings = parse_method(run.patch)
    patch: Any = get_patch(patch_model(model, method, **settings))
    target = run.target_length or patch.extended_length
    drawn = run.positions in collator.DRAWS  # up to the target
    length = patch.original_max_position_embeddings if drawn else target
    model = training.choose_parameters(model, run.train)
    training.chunk_loss(model)
    collate = training.PositionCollator(run.positions, target_length=target, seed=run.seed)
    training.check_dependencies(model, collate)
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    texts = evaluation.read_paths([run.text]) if run.text else blocks.read_standard_library()
    data = training.prepare_blocks(texts, tokenizer, length=length, positions=run.positions)
    order = DataLoaderConfiguration(use_seedable_sampler=True)  # checkpoints contain its state
    output, accumulated = run.output_dir, run.gradient_accumulation_steps
    accelerator = Accelerator(log_with=run.report_to, project_dir=output, dataloader_config=order)
    training.check_run(model, positions=run.positions)
    loader = DataLoader(data.dataset, run.per_device_train_batch_size, True, collate_fn=collate)
    optimizer = torch.optim.Adam(model.parameters(), run.learning_rate, (0.9, 0.95))
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer, loader)
    scheduler = get_scheduler("linear", optimizer, run.warmup_steps, run.max_steps)
    accelerator.register_for_checkpointing(scheduler)  # prepared, it would step per process
    accelerator.init_trackers("finetune_loop", asdict(run))
    set_seed(run.seed)
    step = checkpoints.resume(accelerator, output, {**asdict(run), "blocks": data.counts.sha256})
    while step < run.max_steps:
        epoch, done = divmod(step, len(range(0, len(loader), accumulated)))
        collate.set_epoch(epoch)
        loader.set_epoch(epoch)
        batches = iter(skip_first_batches(loader, done * accumulated))
        # An epoch's first batch draws a random number: a state restored within it has drawn it already.
        with torch.random.fork_rng(devices=[], enabled=done > 0):
            parts = [part for _, part in zip(range(accumulated), batches, strict=False)]
        while parts and step < run.max_steps:
            # The mean over a step's tokens in all parts and processes; not a mean of their means.
            tokens = sum((part["labels"][:, 1:] != -100).sum() for part in parts)
            tokens, total = accelerator.reduce(tokens), 0.0
            for part in parts:
                accelerator.sync_gradients = last = part is parts[-1]
                with nullcontext() if last else accelerator.no_sync(model):
                    loss = model(**part, num_items_in_batch=tokens).loss
                    accelerator.backward(loss * accelerator.num_processes)  # gradients are averaged
                total += loss.detach()
            norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
            if not accelerator.optimizer_step_was_skipped:
                scheduler.step()
            step, total = step + 1, accelerator.reduce(total).item()
            accelerator.print(f"step {step}/{run.max_steps}  loss {total:.6f}  gradient {norm:.3f}")
            accelerator.log({"loss": total, "grad_norm": norm}, step)
            if step % run.save_steps == 0 or step == run.max_steps:
                checkpoints.save(accelerator, output, step)
            parts = [part for _, part in zip(range(accumulated), batches, strict=False)]
    result, weights = accelerator.unwrap_model(model), accelerator.get_state_dict(model)
    result.save_pretrained(output, state_dict=weights, is_main_process=accelerator.is_main_process)
    tokenizer.save_pretrained(output)
    accelerator.end_training()


if __name__ == "__main__":
    main()
