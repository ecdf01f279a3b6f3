"""Candidates: the methods that a run compares, one for each `--patch`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosencError
from hf_posenc.methods import LengthDependent, Method, get_method, update_of
from hf_posenc.patch.config import PatchConfig, check_seams, parse_method

if TYPE_CHECKING:
    from torch import nn

    from hf_posenc.model.discovery import RotaryTable

UNPATCHED = "none"
TRUNCATION = "truncation"
"""The model as loaded, which reads only as many of the last tokens as it was trained at: the control."""
CONTROLS = (UNPATCHED, TRUNCATION, "attention_sinks")
"""The model as loaded, and plain attention to the last original-context tokens, which no length breaks."""
# A plus sign in front of a name; the one in `rope_theta=1e+6` belongs to a number.
_PLUS = re.compile(r"\+(?=\s*[A-Za-z_])")
_MAX_SHOWN = 4  # numbers of a list in a label


@dataclass(frozen=True)
class Part:
    """One method of a candidate.

    Attributes:
        auto: Its scale is computed from the length of the text: it takes a scale and was given none.
    """

    method: str
    options: dict[str, Any]
    auto: bool = False

    @property
    def update(self) -> str | None:
        """The update mode of a length-dependent method; `None` for the others."""
        kind = get_method(self.method)
        if not issubclass(kind, LengthDependent):
            return None
        return str(self.options.get("update", kind.knobs()["update"]))

    @property
    def length_dependent(self) -> bool:
        """True if its result for a token depends on the length of the text behind that token."""
        return self.update not in (None, "row")

    def build(self, scale: float) -> Method:
        """Return the method object; `scale` is the automatic one."""
        automatic = {"scale": scale} if self.auto else {}
        return get_method(self.method).from_options(**automatic, **self.options)


@dataclass(frozen=True)
class Candidate:
    """A method with options, or several on different seams, or the model as it was loaded, maybe with truncated texts.

    Attributes:
        spec: The text of `--patch`, e.g. `"yarn:scale=8"`.
        parts: The methods, in their order; empty for the model as loaded.
        beside: `target_length`, `original_max_position_embeddings`, `layers`, `compose`, `replace`, where given.
        name: The label in reports; `None`: made from the parts.
        original: The original length that the scale refers to, or that `truncation` reads, in tokens; `None` until
            `checked`.
        moves: Whether a rotary table or a saved patch depends on the length of the text; set by `checked`.
        stateful: Whether one of these tables is the model's own: transformers' dynamic RoPE keeps the table of the
            longest text that it has read, whatever else is patched in; set by `checked`.
        reach: The most tokens that the model has positions for under it; `None`: no end, or it follows the scale. Set
            by `checked`.
        state: For `as_it_is`: identifies this state of the model, its weights above all.
    """

    spec: str
    parts: tuple[Part, ...] = ()
    beside: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    original: int | None = None
    moves: bool = False
    stateful: bool = False
    reach: int | None = None
    state: str | None = None

    @classmethod
    def parse(cls, spec: str, *, unpatched: bool = True) -> Candidate:
        """Read the short form `method:option=value,...`, or several of these joined by `+`.

        With `unpatched`, `none` and `truncation` are read too.
        """
        control, options_given, _ = spec.strip().lower().partition(":")
        if unpatched and control in (UNPATCHED, TRUNCATION):
            if options_given:
                raise PosencError(f"--patch {spec}: {control} takes no options.")
            return cls(control)
        named: list[tuple[str, dict[str, Any]]] = []
        beside: dict[str, Any] = {}
        for text in _PLUS.split(spec):
            name, options = parse_method(text)
            knobs = get_method(name).knobs()
            named.append((name, {k: v for k, v in options.items() if k in knobs}))
            for option in (option for option in options if option not in knobs):
                if beside.setdefault(option, options[option]) != options[option]:
                    raise PosencError(f"{spec}: {option} is given twice, with different values.")
        if len(named) > 1 and "target_length" in beside:
            raise PosencError(
                f"{spec}: target_length belongs to one method; give scale= to those that take one."
            )
        auto = _automatic(named) if "target_length" not in beside else set()
        return cls(spec, tuple(Part(*method, method[0] in auto) for method in named), beside)

    @classmethod
    def of(
        cls, parts: Sequence[Part], beside: Mapping[str, Any], name: str | None = None
    ) -> Candidate:
        """Return the candidate of some methods, with the text of `--patch` that measures it again."""
        specs = []
        for part, given in _with_options(parts, beside):
            options = ",".join(f"{option}={_text(value)}" for option, value in given.items())
            specs.append(f"{part.method}:{options}" if options else part.method)
        return cls("+".join(specs), tuple(parts), beside, name)

    @classmethod
    def installed(cls, config: PatchConfig) -> Candidate:
        """Return the candidate of the patch that a model carries."""
        beside: dict[str, Any] = {
            "layers": config.layers,
            "compose": config.compose,
            "replace": config.replace,
            "target_length": config.target_length or False,
        }
        return cls.of(
            [Part(name, dict(options)) for name, options in config.parts],
            {name: value for name, value in beside.items() if value not in (False, "full")},
            str(config) if config.elsewhere else None,
        )

    @classmethod
    def as_it_is(cls, model: nn.Module, label: str, state: str) -> Candidate:
        """Return a model as it is, patched or not; numbers are stored under `state`, such as a step of a training."""
        from hf_posenc.patch.patching import get_patch

        patch = get_patch(model)
        installed = cls(label) if patch is None else cls.installed(patch.config)
        original = None if patch is None else patch.original_max_position_embeddings
        moves, stateful = movement(model)
        about: dict[str, Any] = {"original": original, "moves": moves, "stateful": stateful}
        return dataclasses.replace(installed, spec=label, name=label, state=state, **about)

    @property
    def label(self) -> str:
        """The label in reports: `yarn (scale 4) + log_n`, `yarn (auto)`, `rerope (window 128, log_n)`."""
        if self.name is not None:
            return self.name
        labels = []
        for part, options in _with_options(self.parts, self.beside):
            shown = ["auto"] * part.auto + [_shown(*option) for option in options.items()]
            labels.append(f"{part.method} ({', '.join(shown)})" if shown else part.method)
        return " + ".join(labels) or (TRUNCATION if self.truncates else UNPATCHED)

    @property
    def truncates(self) -> bool:
        """True if the model as loaded reads only as many of the last tokens as it was trained at."""
        return self.spec == TRUNCATION and self.state is None

    @property
    def most(self) -> int | None:
        """The most tokens that are read in front of a token, the nearest ones; `None`: all."""
        return self.original if self.truncates else None

    @property
    def method(self) -> str | None:
        """The method's name, several joined by `+`, or `truncation`; `None` for the model as loaded."""
        name = TRUNCATION if self.truncates else None
        return "+".join(part.method for part in self.parts) or name

    @property
    def patches(self) -> bool:
        """True if something is patched in for the measurement."""
        return bool(self.parts) and self.state is None

    @property
    def auto_scale(self) -> bool:
        """True if a scale is `length / original length`, anew at every length."""
        return any(part.auto for part in self.parts)

    @property
    def changes_attention(self) -> bool:
        """True if a method needs more than another rotary table."""
        return any(
            get_method(part.method).seam != "rotary" or part.update not in (None, "sequence")
            for part in self.parts
        )

    @property
    def length_dependent(self) -> bool:
        """True if the result for a token depends on the length of the text behind it."""
        return self.moves or (self.patches and any(p.length_dependent for p in self.parts))

    @property
    def key(self) -> str:
        """Everything that determines the candidate, in one canonical line; a target length is its scale."""
        options, beside = [dict(part.options) for part in self.parts], dict(self.beside)
        of_length = "target_length" in beside and bool(self.parts)
        scaled = of_length and get_method(self.parts[0].method).takes_scale()
        if scaled and self.original:
            options[0].setdefault("scale", beside.pop("target_length") / self.original)
        parts = [[p.method, own, p.auto] for p, own in zip(self.parts, options, strict=True)]
        state = [self.state] if self.state is not None else [TRUNCATION] * self.truncates
        text = json.dumps([parts, beside, self.original, *state])
        return json.dumps(json.loads(text, parse_float=_number), sort_keys=True)

    @property
    def scale(self) -> float | None:
        """The given scale; `None` for none, or an automatic one."""
        return next((p.options["scale"] for p in self.parts if "scale" in p.options), None)

    def scale_at(self, length: int) -> float | None:
        """Return the automatic scale at a length: at least 1, as a shorter text than the original needs none."""
        if not self.auto_scale:
            return None
        assert self.original is not None
        return max(1.0, length / self.original)

    def check_values(self, *, own: bool = True) -> None:
        """Raise for a value that a method refuses on every model; with `own`, models may have LongRoPE's lists."""
        with self._naming():
            methods = []
            for part in self.parts:
                kind, scale = get_method(part.method), {"scale": 1.0}
                if own and kind.name == "longrope" and not part.options:
                    continue
                scaled = kind.takes_scale() and (part.auto or "target_length" in self.beside)
                methods.append(kind.from_options(**(scale if scaled else {}) | part.options))
            check_seams(methods)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except PosencError as error:
            raise PosencError(f"--patch {self.spec}: {error}") from error

    def arguments(self, scale: float = 1.0) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of `patch_model` with this automatic scale: method or methods, and keyword arguments."""
        if len(self.parts) > 1:
            return [part.build(scale) for part in self.parts], dict(self.beside)
        part = self.parts[0]
        automatic = {"scale": scale} if part.auto else {}
        return part.method, {**automatic, **part.options, **self.beside}

    @property
    def call(self) -> str:
        """The Python code that patches `model` with the given options; automatic scales are not in it."""
        if len(self.parts) == 1:
            method, options = repr(self.parts[0].method), {**self.parts[0].options, **self.beside}
        else:
            methods = (_call(get_method(p.method).__name__, p.options) for p in self.parts)
            method, options = f"[{', '.join(methods)}]", dict(self.beside)
        return _call("patch_model", options, "model", method)

    def checked(self, model: nn.Module) -> Candidate:
        """Patch the model on trial; return the candidate with its `original` length, `moves` and `stateful`."""
        from hf_posenc.evaluation.scoring.decoder import position_limit
        from hf_posenc.patch.patching import get_patch

        saved = get_patch(model)
        if saved is not None and (self.parts or self.truncates):
            raise PosencError(
                f"--patch {self.spec}: this model carries a saved patch ({str(saved).splitlines()[0]}); it is "
                "measured as it is, with --patch none only."
            )
        with self._naming(), dataclasses.replace(self, original=1).applied(model, 1):
            patch, (moves, stateful) = get_patch(model), movement(model)
            reach = None if self.auto_scale or self.truncates else position_limit(model)
        original = original_length(model, ()) if self.truncates else None
        if self.parts and patch is not None:
            original = patch.original_max_position_embeddings
        about: dict[str, Any] = {"moves": moves, "stateful": stateful, "reach": reach}
        return dataclasses.replace(self, original=original, **about)

    @contextlib.contextmanager
    def applied(self, model: nn.Module, length: int) -> Iterator[None]:
        """Patch the model for this length; undone on exit."""
        import torch

        from hf_posenc.patch.patching import patched

        if not self.patches:
            yield
            return
        method, options = self.arguments(self.scale_at(length) or 1.0)
        with contextlib.ExitStack() as stack:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)  # drawn parameters are the same each time
                stack.enter_context(patched(model, method, **options))
            yield


def within_reach(
    model: nn.Module, candidates: Sequence[Candidate], lengths: Sequence[int], *, given: bool
) -> tuple[int, ...]:
    """Return the lengths that some checked candidate has positions for; raise for others that were `given`."""
    from hf_posenc.evaluation.scoring.decoder import too_long

    reaches = [candidate.reach for candidate in candidates if candidate.reach is not None]
    if len(reaches) < len(candidates) or max(lengths) <= max(reaches):
        return tuple(lengths)
    most = max(reaches)
    if given:
        raise too_long(model, next(length for length in lengths if length > most), most)
    return tuple(length for length in lengths if length <= most) or (most,)


def _with_options(
    parts: Sequence[Part], beside: Mapping[str, Any]
) -> Iterator[tuple[Part, dict[str, Any]]]:
    """Yield the parts with their options; those beside are written behind the first."""
    for index, part in enumerate(parts):
        yield part, {**part.options, **(beside if index == 0 else {})}


def _call(name: str, options: Mapping[str, Any], *values: str) -> str:
    return f"{name}({', '.join([*values, *(f'{k}={v!r}' for k, v in options.items())])})"


def _automatic(named: list[tuple[str, dict[str, Any]]]) -> set[str]:
    """Return the methods with an automatic scale: those that require one and, if nothing else scales, an optional one.

    A method whose `scale` is `None` by default needs none where what it computes from it (`group`, `k`) is given.
    """
    default = {name: get_method(name).knobs().get("scale", 1.0) for name, _ in named}
    required = {name for name, value in default.items() if value is dataclasses.MISSING}
    without = {name: options for name, options in named if "scale" not in options}
    if required:
        return required & set(without)
    automatic = set()
    scalable = (name for name in without if default[name] is None)
    for name in (name for name in scalable if get_method(name).seam != "query"):
        with contextlib.suppress(PosencError):
            get_method(name).from_options(scale=2.0, **without[name])
            automatic.add(name)
    return automatic


def _shown(option: str, value: Any) -> str:
    """Return an option for a label; a switch that is on by its name alone, a long list by its length."""
    if value is True:
        return option
    if isinstance(value, tuple | list) and len(value) > _MAX_SHOWN:
        return f"{option} of {len(value)} numbers"
    return f"{option} {value:g}" if isinstance(value, float) else f"{option} {value}"


def _text(value: Any) -> str:
    """Return a value in the short form of `--patch`; lists as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value)


def parse_candidates(specs: Sequence[str]) -> list[Candidate]:
    """Read a list of candidates, each once."""
    candidates = [Candidate.parse(spec) for spec in specs]
    check_unique(candidates)
    return candidates


def checked_candidates(
    model: nn.Module, specs: Sequence[str] | None
) -> tuple[list[Candidate], int | None]:
    """Return the `checked` candidates, by default the model as loaded, and the length that it was trained on."""
    parsed = parse_candidates(specs or (UNPATCHED,))
    candidates = agreed(model, [candidate.checked(model) for candidate in parsed])
    return candidates, original_length(model, candidates)


def agreed(
    model: nn.Module, candidates: Sequence[Candidate], original: int | None = None
) -> list[Candidate]:
    """Return the checked candidates, truncation with what the model reads by the original lengths of others' options.

    `original` is what it reads, where that is known.

    Raises:
        PosencError: Options give several, or there is none, also in the config.
    """
    from hf_posenc.model.context import length_of

    given = {
        length_of(model, original=c.original) if c.beside.get("replace") else c.original
        for c in candidates
        if c.beside.get("original_max_position_embeddings")
    }
    lengths = [original] if original else sorted(length for length in given if length)
    cut = [candidate for candidate in candidates if candidate.truncates]
    if not cut or (not lengths and cut[0].original is not None):
        return list(candidates)
    if len(lengths) > 1:
        raise PosencError(
            f"--patch {TRUNCATION} needs one original length, and options give {', '.join(map(str, lengths))}. "
            f"Measure these in commands of their own, or leave {TRUNCATION} out."
        )
    if not lengths:
        raise PosencError(
            f"--patch {TRUNCATION}: the model's config names no context length to truncate texts to, or can be read in "
            "two ways. Give the option original_max_position_embeddings to another --patch, or leave it out."
        )
    return [dataclasses.replace(c, original=lengths[0]) if c.truncates else c for c in candidates]


def check_unique(candidates: Sequence[Candidate]) -> None:
    """Refuse a candidate that is given twice."""
    counts = Counter(candidate.label for candidate in candidates)
    for label in (label for label, count in counts.items() if count > 1):
        raise PosencError(f"--patch {label} is given twice.")


Scales = Sequence[float] | Callable[[Candidate], Sequence[float]]
"""Scales of all methods, or of each."""


def crossed(specs: Sequence[str], scales: Scales) -> list[tuple[Candidate, bool]]:
    """Cross methods with scales; a method without a scale, or with a given one, is listed once.

    Returns:
        The candidates, each with True if it is a control; the controls first.
    """
    requested = []
    for candidate in map(Candidate.parse, specs):
        takers = [part for part in candidate.parts if part.auto] or [
            part  # works without a scale, and was given none (`dynamic_ntk`)
            for part in candidate.parts
            if isinstance(get_method(part.method).knobs().get("scale"), int | float)
            and "scale" not in part.options
        ]
        if "target_length" in candidate.beside or not takers:
            requested.append(candidate)
            continue
        for scale in scales(candidate) if callable(scales) else scales:
            parts = [
                Part(part.method, {"scale": scale, **part.options}) if part in takers else part
                for part in candidate.parts
            ]
            for part in parts:
                part.build(1.0)  # raises if the method refuses the scale
            requested.append(Candidate.of(parts, candidate.beside))
    check_unique(requested)
    competing = [candidate for candidate in requested if candidate.parts]
    labels = [candidate.label for candidate in competing]
    if not competing:
        raise PosencError(
            "There is nothing to compare: --patch none is always measured. Name a method, such as --patch yarn."
        )
    controls = [Candidate.parse(spec) for spec in CONTROLS if spec not in labels]
    return [*((c, True) for c in controls), *((c, False) for c in competing)]


def _number(text: str) -> float:
    """Return a number, a whole one as an integer: a sweep's scale of 2.0 is the 2 of a command line."""
    value = float(text)
    return int(value) if value.is_integer() else value


def movement(model: nn.Module) -> tuple[bool, bool]:
    """Return whether a live table depends on the length of the text, and whether a table of the model's own does.

    The modules are called, and the config is not read: a checkpoint may be dynamic, or LongRoPE, by itself.
    """
    from hf_posenc.model.discovery import rotary_tables
    from hf_posenc.patch.state import state_of

    own = any(_moves(model, table) for table in rotary_tables(model))
    state = state_of(model)
    methods = () if state is None else state.methods
    return own or any(update_of(each) not in ("row", "static") for each in methods), own


def _moves(model: nn.Module, table: RotaryTable) -> bool:
    """Return whether a table depends on the length of the text, and no patch sets its frequencies."""
    from hf_posenc.model.rotary import PosencRotary, RotaryWrapper, moves_with_length

    base = rotary = model.get_submodule(table.name)
    while isinstance(base, RotaryWrapper):
        if isinstance(base, PosencRotary) and table.label in base.specs:
            return False
        base = base.base
    tensors = [*rotary.buffers(), *rotary.parameters(), *model.parameters()]
    return moves_with_length(rotary, table.label, tensors[0].device)


def original_length(model: nn.Module, candidates: Sequence[Candidate]) -> int | None:
    """Return the length that methods start from: that of truncation, else the longest of the patches or what is read.

    `None` if the model's config names no length, or can be read in two ways.
    """
    from hf_posenc.model.context import length_of
    from hf_posenc.patch.patching import get_patch

    cut = [each for each in candidates if each.truncates] or candidates
    original = max((each.original for each in cut if each.original), default=None)
    patch = get_patch(model)
    if original is None and patch is not None:
        original = patch.original_max_position_embeddings
    config: Any = model.config
    named = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(named, int) and named < 1:
        raise PosencError(f"The config names a context length of {named}: correct it there.")
    return original or length_of(model)
