"""Train the embedded model from start to finish: corpus, tokenizer, training, held-out perplexity, model card.

    python scripts/train_tiny_llama.py --preset cpu --output hf_posenc/embedded/tiny_llama
    python scripts/train_tiny_llama.py --preset smoke --output smoke             # a test of the pipeline

The number of steps is fixed, every random choice follows from the seed, and the data of a step depends on its
number only. A killed run that is started again with the same arguments resumes from its last checkpoint (in
`--work`) with the same losses. The corpus is the Python source of the running environment
(`hf_posenc.embedded.corpus`); `training_log.json` lists its packages.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import platform
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
import typer
from packaging.utils import canonicalize_name
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_posenc.embedded import HELD_OUT, held_out_documents
from hf_posenc.embedded.corpus import Corpus, Source, select, standard_library
from hf_posenc.errors import PosencError
from hf_posenc.files import to_json, write_atomically

END_OF_TEXT = "<|endoftext|>"  # id 0: between documents; bos, eos and pad at once
_PERMISSIVE = re.compile(
    r"(?i)\b(MIT|BSD|0BSD|Apache|PSF|Python Software Foundation|ISC|HPND|Unlicense)"
)
_RESTRICTIVE = re.compile(r"(?i)\b([AL]?GPL|MPL|Mozilla|GNU|EPL|CDDL|Proprietary)")


@dataclass(frozen=True)
class Settings:
    """Settings that determine the result, apart from the environment that the corpus comes from."""

    vocab_size: int = 2048  # of byte-level BPE
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 384
    context: int = 256  # the trained length, which is `max_position_embeddings`
    rope_theta: float = 10_000.0
    batch: int = 16
    steps: int = 7000
    warmup: int = 100  # the rate is then linear to zero
    muon_lr: float = 0.02  # of the matrices
    adamw_lr: float = 0.01  # of the embedding and the norms
    weight_decay: float = 0.01  # of the matrices
    bytes_per_source: int = 4_000_000  # at most, of an installed distribution
    max_sources: int | None = None
    tokenizer_bytes: int = 20_000_000  # of the text that trains the tokenizer, about
    log_every: int = 50
    checkpoint_every: int = 250
    evaluate_every: int = 500
    windows: int = 48  # of held-out text, in the running evaluation
    seed: int = 1

    def __post_init__(self) -> None:
        if self.checkpoint_every % self.log_every or self.evaluate_every % self.log_every:
            raise ValueError("checkpoint_every and evaluate_every must be multiples of log_every.")


PRESETS = {
    "cpu": Settings(),
    "smoke": Settings(
        vocab_size=384, hidden=32, layers=2, heads=2, kv_heads=1, mlp=64, context=64, batch=4, steps=20,
        warmup=2, bytes_per_source=100_000, max_sources=1, tokenizer_bytes=100_000, log_every=2,
        checkpoint_every=6, evaluate_every=10, windows=4,
    ),
}  # fmt: skip


def environment(exclude: Iterable[str] = ("hf-posenc",)) -> Iterator[Source]:
    """Yield the standard library and the installed distributions with a permissive licence, in corpus order.

    Distributions without a licence in their metadata are left out.
    """
    yield standard_library()
    installed = {
        canonicalize_name(name): distribution
        for distribution in metadata.distributions()
        if (name := distribution.metadata["Name"])
    }
    for name in sorted(installed.keys() - set(map(canonicalize_name, exclude))):
        distribution = installed[name]
        licence = _licence(distribution)
        paths = sorted(path.as_posix() for path in distribution.files or () if path.suffix == ".py")
        if not paths or not _PERMISSIVE.search(licence) or _RESTRICTIVE.search(licence):
            continue
        root = Path(str(distribution.locate_file("")))
        paths = [path for path in paths if not path.startswith("..")]
        yield Source(name, distribution.version, licence, root, tuple(paths))


def _licence(distribution: metadata.Distribution) -> str:
    """Return the licence of a distribution: the expression in its metadata, else its classifiers, else the field."""
    fields = distribution.metadata
    classifiers = [
        line.split(" :: ")[-1]
        for line in fields.get_all("Classifier") or ()
        if line.startswith("License ::")
    ]
    expression = "".join(fields.get_all("License-Expression") or ())
    lines = "".join(fields.get_all("License") or ()).strip().splitlines()
    return expression or ", ".join(classifiers) or "".join(lines[:1])[:60]


def train_tokenizer(corpus: Corpus, vocab_size: int, characters: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on about so many characters: of every k-th file.

    It has no normalization and no unknown token, so that decoding restores the text. Encoding adds no special token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    stride = max(1, sum(len(text) for *_, text in corpus.files) // characters)
    tokenizer.train_from_iterator((text for *_, text in corpus.files[::stride]), trainer)
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **special, clean_up_tokenization_spaces=False
    )


def token_stream(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> npt.NDArray[np.uint16]:
    """Return the token ids of the whole corpus, shape (n,), with an end-of-text token after every file."""
    encode = tokenizer.backend_tokenizer.encode
    end = tokenizer.eos_token_id
    return np.concatenate([np.array([*encode(t).ids, end], np.uint16) for *_, t in corpus.files])


@dataclass(frozen=True, eq=False)
class Batches:
    """The batches of a run, each a function of its step and of the seed alone.

    The stream is cut into blocks at an offset that differs from epoch to epoch, and the blocks of an epoch are read in
    a seeded random order. A sequence has one token more than the context, as the last target.
    """

    tokens: npt.NDArray[np.uint16]
    context: int
    size: int
    seed: int

    def __post_init__(self) -> None:
        if self.blocks < self.size:
            raise PosencError(
                f"The corpus has {len(self.tokens)} tokens, too few for one batch of {self.size} x "
                f"{self.context}. Install more packages, or raise the limit per source."
            )

    @property
    def blocks(self) -> int:
        """Blocks in one epoch; the offset and the last target are kept free."""
        return (len(self.tokens) - 1 - self.context) // self.context

    def __getitem__(self, step: int) -> npt.NDArray[np.int64]:
        """Return the sequences of one step, shape (size, context + 1)."""
        epoch, position = divmod(step, self.blocks // self.size)
        rng = np.random.default_rng((self.seed, epoch))
        offset = rng.integers(self.context)
        order = rng.permutation(self.blocks)[position * self.size : (position + 1) * self.size]
        starts = offset + order * self.context
        return np.stack([self.tokens[s : s + self.context + 1] for s in starts]).astype(np.int64)


def prepare(settings: Settings, work: Path) -> tuple[Batches, PreTrainedTokenizerFast]:
    """Return the batches and the tokenizer, from a corpus that is selected once per work folder."""
    if not (work / "corpus.json").exists():
        sources = itertools.islice(environment(), settings.max_sources)
        corpus = select(sources, bytes_per_source=settings.bytes_per_source)
        tokenizer = train_tokenizer(corpus, settings.vocab_size, settings.tokenizer_bytes)
        tokenizer.save_pretrained(work / "tokenizer")
        stream = token_stream(corpus, tokenizer)
        np.save(work / "tokens.npy", stream)
        summary = {
            "sources": corpus.composition,
            "files": len(corpus.files),
            "bytes": sum(int(row["bytes"]) for row in corpus.composition),
            "tokens": len(stream),
            "left_out": corpus.left_out,
            "held_out": list(HELD_OUT),
        }
        # Written last: it marks the folder as complete.
        write_atomically(work / "corpus.json", to_json(summary))
    stream = np.load(work / "tokens.npy")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    return Batches(stream, settings.context, settings.batch, settings.seed), tokenizer


def build(settings: Settings) -> LlamaForCausalLM:
    """Build the Llama, initialized from the seed."""
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        intermediate_size=settings.mlp,
        max_position_embeddings=settings.context,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def build_optimizers(model: nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding (tied to the head) and the norms."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=settings.muon_lr, weight_decay=settings.weight_decay),
        torch.optim.AdamW(rest, lr=settings.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate(step: int, settings: Settings) -> float:
    """Factor of both learning rates: linear warm-up, then linear to zero."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    return (settings.steps - step) / (settings.steps - settings.warmup)


def update(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], step: int, settings: Settings
) -> None:
    """Take a step by the gradients, which are cut to a norm of one and cleared."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, peak in zip(optimizers, (settings.muon_lr, settings.adamw_lr), strict=True):
        optimizer.param_groups[0]["lr"] = peak * rate(step, settings)
        optimizer.step()
        optimizer.zero_grad()


def held_out_windows(
    tokenizer: PreTrainedTokenizerFast, count: int, longest: int, target: int
) -> tuple[Tensor, int]:
    """Return windows of held-out text, shape (count, longest), and the UTF-8 bytes of the last `target` tokens of all.

    They are spread evenly over the documents, and within each.
    """
    texts = [text for _, text in held_out_documents()]
    texts = texts[:: max(1, len(texts) // count)]
    documents = [tokenizer.backend_tokenizer.encode(text).ids for text in texts]
    documents = [ids for ids in documents if len(ids) > longest]
    each = math.ceil(count / len(documents))
    windows = [
        ids[start : start + longest]
        for ids in documents
        for start in np.linspace(0, len(ids) - longest, each).astype(int)
    ]
    windows = [windows[i] for i in np.linspace(0, len(windows) - 1, count).astype(int)]
    scored = (tokenizer.convert_ids_to_tokens(window[-target:]) for window in windows)
    # A byte-level token has one character per byte.
    return torch.tensor(windows), sum(len(token) for tokens in scored for token in tokens)


@torch.no_grad()
def perplexity(
    model: LlamaForCausalLM, windows: Tensor, length: int, target: int, batch: int = 8
) -> float:
    """Perplexity of each window's last `target` tokens, if the model reads its last `length` tokens alone."""
    model.eval()
    total = 0.0
    for chunk in windows[:, -length:].split(batch):
        logits = model(input_ids=chunk, use_cache=False, logits_to_keep=target + 1).logits
        logits = logits[:, :-1].float().flatten(0, 1)
        total += float(F.cross_entropy(logits, chunk[:, -target:].flatten(), reduction="sum"))
    model.train()
    return math.exp(total / (len(windows) * target))


def train(
    settings: Settings, work: Path, *, compile_model: bool = False
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast, dict[str, Any]]:
    """Return the model, trained from the last checkpoint in `work` or from the start, its tokenizer and the record.

    `compile_model` uses torch.compile (needs a C++ compiler on a CPU; about 1.5 times faster).
    """
    work.mkdir(parents=True, exist_ok=True)
    described = dataclasses.asdict(settings)
    checkpoint = work / "checkpoint.pt"
    state = torch.load(checkpoint, map_location="cpu") if checkpoint.exists() else None
    if state is not None and state["settings"] != described:
        raise typer.BadParameter(f"{checkpoint} is of another run; give an empty --work folder.")
    batches, tokenizer = prepare(settings, work)
    target = settings.context // 2
    windows, _ = held_out_windows(tokenizer, settings.windows, settings.context, target)
    model = build(settings)
    optimizers = build_optimizers(model, settings)
    first, spent, curve = 0, 0.0, []
    if state is not None:
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first, spent, curve = state["step"], state["seconds"], state["curve"]
        print(f"resumed at step {first}", flush=True)

    def loss_of(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    compute = torch.compile(loss_of) if compile_model else loss_of
    began, running = time.monotonic(), []
    for step in range(first, settings.steps):
        loss = compute(torch.from_numpy(batches[step]))
        loss.backward()
        update(model, optimizers, step, settings)
        running.append(loss.detach())
        done = step + 1
        if done % settings.log_every == 0 or done == settings.steps:
            row = {"step": done, "loss": round(float(torch.stack(running).mean()), 5)}
            running = []
            if done % settings.evaluate_every == 0 or done == settings.steps:
                value = perplexity(model, windows, settings.context, target)
                row["held_out_perplexity"] = round(value, 4)
            curve.append(row)
            seconds = time.monotonic() - began
            left = seconds / (done - first) * (settings.steps - done) / 60
            print(f"{row}  {spent + seconds:.0f} s, {left:.0f} min left", flush=True)
        if done % settings.checkpoint_every == 0 or done == settings.steps:
            saved = {
                "settings": described,
                "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": done,
                "seconds": spent + time.monotonic() - began,
                "curve": curve,
            }
            torch.save(saved, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    record = {
        "settings": described,
        "curve": curve,
        "tokens": settings.steps * settings.batch * settings.context,
        "seconds": round(spent + time.monotonic() - began),
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "compiled": compile_model,
    }
    return model, tokenizer, record


def export(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    record: dict[str, Any],
    work: Path,
    output: Path,
) -> None:
    """Write the checkpoint in bfloat16, measure the written model, and write the log and the model card."""
    settings = record["settings"]
    nn.Module.to(model, dtype=torch.bfloat16)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)  # safetensors creates a private file
    saved = LlamaForCausalLM.from_pretrained(output, dtype=torch.float32)
    target, lengths = settings["context"] // 2, [settings["context"] * 2**i for i in range(5)]
    windows, target_bytes = held_out_windows(tokenizer, settings["windows"], lengths[-1], target)
    results = []
    for length in lengths:
        value = perplexity(saved, windows, length, target, batch=2)
        bits = math.log2(value) * len(windows) * target / target_bytes
        results.append({"length": length, "perplexity": value, "bits_per_byte": bits})
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")}
    log = {
        **record,
        "parameters": saved.num_parameters(),
        "weight_bytes": (output / "model.safetensors").stat().st_size,
        "special_token": END_OF_TEXT,
        "held_out": {"windows": len(windows), "target": target, "results": results},
        "versions": {"Python": platform.python_version(), **versions},
        "corpus": json.loads((work / "corpus.json").read_text(encoding="utf-8")),
    }
    write_atomically(output / "training_log.json", to_json(log))
    write_atomically(output / "README.md", model_card(log).rstrip("\n") + "\n")


def model_card(log: Mapping[str, Any]) -> str:
    """Return the text of README.md; every number in it is from `training_log.json`."""
    settings, corpus, held_out = log["settings"], log["corpus"], log["held_out"]
    results = held_out["results"]
    template = Path(__file__).with_name("tiny_llama_card.md").read_text(encoding="utf-8")
    return template.format(
        **log,
        head_dim=settings["hidden"] // settings["heads"],
        megabytes=log["weight_bytes"] / 1e6,
        scored=held_out["target"] * held_out["windows"],
        perplexity_rows=_rows(
            (f"{row['length']:,}", f"{row['perplexity']:.2f}", f"{row['bits_per_byte']:.3f}")
            for row in results
        ),
        longest=results[-1]["length"],
        ratio=results[-1]["perplexity"] / results[0]["perplexity"],
        corpus_bytes=corpus["bytes"] / 1e6,
        per_source=settings["bytes_per_source"] / 1e6,
        left_out_rows=_rows((rule, f"{count:,}") for rule, count in corpus["left_out"].items()),
        held_out_names=", ".join(f"`{name}`" for name in corpus["held_out"]),
        source_rows=_rows(
            (row["name"], row["version"], row["licence"], row["files"], f"{row['bytes'] / 1e6:.2f}")
            for row in corpus["sources"]
        ),
        epochs=log["tokens"] / corpus["tokens"],
        minutes=log["seconds"] / 60,
        processor=f"{log['threads']} CPU thread{'s' * (log['threads'] > 1)}",
        version_names=", ".join(f"{name} {version}" for name, version in log["versions"].items()),
        curve_rows=_rows(
            (f"{row['step']:,}", f"{row['loss']:.3f}", f"{row['held_out_perplexity']:.2f}")
            for row in log["curve"]
            if "held_out_perplexity" in row
        ),
    )


def _rows(rows: Iterable[Sequence[object]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def main(
    output: Annotated[Path, typer.Option(help="Folder of the finished checkpoint.")],
    preset: Annotated[str, typer.Option(help=", ".join(PRESETS))] = "cpu",
    work: Annotated[Path | None, typer.Option(help="Corpus and checkpoints; OUTPUT.work.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads; 1 is reproducible to the bit.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Instead of the preset's.")] = None,
    compile_model: Annotated[bool, typer.Option("--compile/--no-compile")] = False,
) -> None:
    """Train the embedded model."""
    if preset not in PRESETS:
        raise typer.BadParameter(f"Unknown preset {preset!r}. Available: {', '.join(PRESETS)}.")
    settings = PRESETS[preset]
    if seed is not None:
        settings = dataclasses.replace(settings, seed=seed)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    folder = work or output.with_name(output.name + ".work")
    model, tokenizer, record = train(settings, folder, compile_model=compile_model)
    flags = ("" if seed is None else f" --seed {seed}") + " --compile" * compile_model
    record |= {"preset": preset, "flags": flags}
    export(model, tokenizer, record, folder, output)
    print(f"wrote {output}", flush=True)


if __name__ == "__main__":
    typer.run(main)
