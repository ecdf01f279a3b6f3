"""A patch as data: `PatchConfig`, its JSON, and the short form of the command line."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_posenc.errors import PosencError, unknown
from hf_posenc.files import finite
from hf_posenc.lengths import read_length
from hf_posenc.methods import Method, RopeScaling, TableFilter, get_method, seam_of

FORMAT = 1
LENGTHS = ("target_length", "original_max_position_embeddings")
"""The arguments of `patch_model` that are lengths in tokens."""
# The arguments of `patch_model` beside a method's own knobs.
_BESIDE = (*LENGTHS, "layers", "compose", "replace")
# Names that other libraries use for options of this one.
_NAMES_ELSEWHERE = {
    "factor": "scale",
    "rope_factor": "scale",
    "scale_factor": "scale",
    "scaling_factor": "scale",
    "max_length": "target_length",
    "max_seq_length": "target_length",
    "max_seq_len": "target_length",
    "max_position_embeddings": "target_length",
    "original_length": "original_max_position_embeddings",
    "original_context_length": "original_max_position_embeddings",
    "base": "rope_theta",
    "theta": "rope_theta",
}
_COMMA = re.compile(r",(?![^\[]*\])")  # not one within a list
Layers = str | tuple[int, ...]
"""A choice of layers: `"full"` (full attention), its `"encoder"` or `"decoder"` part, `"all"`, or layer indices."""


@dataclass(frozen=True, kw_only=True)
class PatchConfig:
    """Everything that determines a patch.

    Attributes:
        method: The method's canonical name.
        options: Its knobs other than the scale, where they differ from the defaults.
        scale: Target context as a multiple of the original one; `None` for methods without a scale.
        target_length: The target context in tokens, where it is not the original length times the scale; else `None`.
        original_max_position_embeddings: The original context length, in tokens; `None`: read from the model.
        layers: The patched layers.
        compose: On an already scaled checkpoint, start from its scaled table.
        replace: On an already scaled checkpoint, start from its `rope_theta`.
        others: Further methods on other seams: the name of each, and its options, the scale among them.
        elsewhere: The patches of other layers, where layers differ; their `layers`, methods and options count.

    Examples:
        >>> from hf_posenc import PatchConfig, get_patch, patch_model
        >>> config = get_patch(patch_model(model, "yarn", scale=4, beta_fast=16)).config
        >>> config.method, config.scale, dict(config.options)
        ('yarn', 4, {'beta_fast': 16})
        >>> PatchConfig.from_json(config.to_json()) == config
        True
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    scale: float | None = None
    target_length: int | None = None
    original_max_position_embeddings: int | None = None
    layers: Layers = "full"
    compose: bool = False
    replace: bool = False
    others: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    elsewhere: tuple[PatchConfig, ...] = ()

    @property
    def parts(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """The name of every method, and its options, the scale among them."""
        return (*self._own_parts, *(part for other in self.elsewhere for part in other.parts))

    @property
    def _own_parts(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        scale = {} if self.scale is None else {"scale": self.scale}
        return ((self.method, {**scale, **self.options}), *self.others)

    def __str__(self) -> str:
        (first, options), *others = self._own_parts
        target = {"target_length": self.target_length} if self.target_length else {}
        own = " + ".join(
            f"{name}({', '.join(f'{key}={short(value)}' for key, value in given.items())})"
            for name, given in ((first, {**options, **target}), *others)
        )
        if not self.elsewhere:
            return own
        rest = (f"{part} in {_layers_in_words(part.layers)}" for part in self.elsewhere)
        return "; ".join((f"{own} in {_layers_in_words(self.layers)}", *rest))

    def build(self) -> tuple[Method, ...]:
        """Return the method objects; raise for an unknown method or option, or a value out of range."""
        return tuple(get_method(name).from_options(**options) for name, options in self.parts)

    def request(self) -> dict[str, Any]:
        """Return the arguments of `patch_model`, beside the model, that make this patch."""
        every = (dataclasses.replace(self, elsewhere=()), *self.elsewhere)
        lengths = {part.original_max_position_embeddings for part in every}
        replaced = any(part.replace for part in every)
        shared: dict[str, Any] = {
            # Layers that start from different lengths read theirs from the model.
            "original_max_position_embeddings": lengths.pop() if len(lengths) == 1 else None,
            # Beside replace=True, a method that changes no frequencies still starts from those in force.
            "compose": not replaced and any(part.compose for part in every),
            "replace": replaced,
            "target_length": self.target_length,
        }
        if self.elsewhere:
            return {"method": {part.layers: list(part.build()) for part in every}, **shared}
        return {"method": self.build(), "layers": self.layers, **shared}

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, as `from_dict` reads it."""
        values = {"format": FORMAT, **dataclasses.asdict(self)}
        values["others"] = [{"method": name, "options": options} for name, options in self.others]
        values["elsewhere"] = [part.to_dict() for part in self.elsewhere]
        for key in ("others", "elsewhere", "target_length"):
            if not values[key]:
                del values[key]
        return dict(finite(values))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PatchConfig:
        """Read the JSON form; keys that a recipe adds (`recipe`, ...) are ignored, unknown methods refused."""
        if values.get("format") != FORMAT:
            raise PosencError(
                f"This patch has format {values.get('format')!r}, but this version of hf_posenc reads format {FORMAT}. "
                "Install a newer hf_posenc, or save the patch again with this one."
            )
        fields = {field.name for field in dataclasses.fields(cls)}
        own = {key: value for key, value in values.items() if key in fields}
        if "method" not in own:
            raise PosencError('A patch names its "method".')
        if isinstance(own.get("layers"), list):
            own["layers"] = tuple(own["layers"])
        try:
            own["others"] = tuple((o["method"], o["options"]) for o in own.get("others", ()))
            own["elsewhere"] = tuple(map(cls.from_dict, own.get("elsewhere", ())))
            config = cls(**own)
            parts = config.parts
        except (AttributeError, KeyError, TypeError) as error:
            raise PosencError(f"This is not a patch: {type(error).__name__}: {error}.") from error
        if not all(isinstance(flag, bool) for flag in (config.compose, config.replace)):
            raise PosencError('"compose" and "replace" of a patch are true or false.')
        for name, _ in parts:
            try:
                get_method(name)
            except PosencError as error:
                raise PosencError(
                    f"{error} For one of your own, import the code that registers it first (register_method)."
                ) from error
        config.build()
        return config

    def to_json(self) -> str:
        """Return the JSON text that `save_patch` writes."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> PatchConfig:
        """Read the JSON text; raise for text that is not JSON, or not a patch."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PosencError(f"This is not a patch in JSON: {error}.") from error
        if not isinstance(values, dict):
            raise PosencError("A patch in JSON is an object with a method and its options.")
        return cls.from_dict(values)


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """Read the short form `"yarn:scale=8,beta_fast=16"`: the method's canonical name, and its options.

    The options are numbers, booleans, `None`, strings, or lists of these in brackets: `"nope:layers=[1,3]"`.
    """
    name, colon, rest = text.partition(":")
    if re.search(r"[\s(,=]", name.strip()):  # as reports print a patch: yarn(scale=4)
        raise PosencError(f"{text!r}: options follow a colon, as in yarn:scale=8,beta_fast=16.")
    method = named_method(name.strip())
    options: dict[str, Any] = {}
    for part in (part.strip() for part in _COMMA.split(rest) if colon):
        option, _, value = (piece.strip() for piece in part.partition("="))
        if not option or not value:
            raise PosencError(f"{text!r}: {part!r} is not option=value, like scale=8,beta_fast=16.")
        check_option(method, option)
        if option in options:
            raise PosencError(f"{text!r}: {option} is given twice; give it once.")
        options[option] = _value(value)
        if option in LENGTHS:
            options[option] = read_length(options[option], f"{text!r}: {option}")
    return method.name, options


def named_method(name: str) -> type[Method]:
    """Return the method of a name or alias; raise for `none`, which stands for the unpatched model."""
    if name.strip().lower() == "none":
        raise PosencError(
            "'none' is the model as it was loaded, and not a method: leave it out, or undo one by unpatch_model(model)."
        )
    return get_method(name)


def check_option(method: type[Method], option: str) -> None:
    """Raise for an option that is neither a knob of a method nor an argument of `patch_model`."""
    possible = (*method.knobs(), *_BESIDE)
    if option in possible:
        return
    if (here := _NAMES_ELSEWHERE.get(option.lower())) in possible:
        raise PosencError(f"Unknown option of {method.name} {option!r}. It is called {here} here.")
    raise unknown(f"option of {method.name}", option, possible)


def check_seams(parts: Sequence[Method | type[Method]]) -> None:
    """Raise for a list of methods of which two exclude each other, or with a filter before the table it changes."""
    frequencies = [part for part in parts if of_kind(part, RopeScaling)]
    filters = [part for part in frequencies[1:] if of_kind(part, TableFilter)]
    for part, later in itertools.pairwise(frequencies):
        last = of_kind(part, TableFilter) and not of_kind(later, TableFilter)
        if last and "rotary" in later.beside:
            raise PosencError(
                f"{part.name} changes the table of the method before it in a list: name {later.name} first."
            )
    alone = [part for part in parts if id(part) not in map(id, filters)]
    seams = [seam_of(part) if isinstance(part, Method) else part.seam for part in alone]
    scaling = [f"{part.name} with log_n" for part in alone if getattr(part, "log_n", False)]
    for seam in seams:
        names = [part.name for part, own in zip(alone, seams, strict=True) if own == seam]
        names += scaling if seam == "query" else []
        if len(names) > 1:
            raise PosencError(
                f"Two methods on one seam exclude each other: {', '.join(names)} ({seam}). Pick one of them."
            )
    tables = [part.name for part in alone if of_kind(part, RopeScaling)]
    if len(tables) > 1:  # also where one of them computes its table inside attention
        raise PosencError(f"Two rotary tables exclude each other: {', '.join(tables)}. Pick one.")


def of_kind(part: Method | type[Method], kind: type[Method]) -> bool:
    """Return whether a method, a class or an object, is of a kind."""
    return issubclass(part if isinstance(part, type) else type(part), kind)


def _layers_in_words(layers: Layers) -> str:
    """`"the full layers"`, `"layers 0-15, 20"`."""
    if isinstance(layers, str):
        return f"the {layers} layers"
    # In a run of neighbours, numbers and places differ by the same.
    groups = itertools.groupby(enumerate(sorted(layers)), lambda pair: pair[1] - pair[0])
    runs = ([number for _, number in group] for _, group in groups)
    spans = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(spans)}"


def short(value: object) -> str:
    """Return a value in words that fit into a line."""
    if isinstance(value, tuple | list) and len(value) > 4:
        return f"[{len(value)} numbers]"
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except (ValueError, RecursionError):  # of JSON, or beyond the limits of its parser
        return None if text.lower() == "none" else text
