"""Different methods in different layers: keys stay cached as the model rotates them, and each layer turns them on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.rotation import Rotation
from hf_posenc.errors import UnsupportedModelError
from hf_posenc.methods import LengthDependent, Method, RopeScaling, YaRN, needs_no_rotation
from hf_posenc.methods.bands import moved
from hf_posenc.methods.contract import check_frequencies
from hf_posenc.model.attention import Layer
from hf_posenc.model.calibration import CalibratedLayer, Wrappers
from hf_posenc.model.discovery import RotaryTable, layer_index, read_spec
from hf_posenc.model.temperature import OwnTemperature, refuse_own
from hf_posenc.patch.attention import (
    encoding_of,
    install_attention,
    of_queries,
    plain_encoding,
    refuse_missing,
)
from hf_posenc.patch.state import LayerPart, State


@dataclass(frozen=True, eq=False)
class Turn:
    """Turns queries and keys from the model's own rotation to the one that an encoding expects."""

    own: Rotation  # the rotation that they have
    # Frequencies beyond it, shape (d/2,), radians per token; `None`: none.
    frequencies: Tensor | None
    factor: float  # the factor on cos and sin beyond it
    encoding: Encoding  # the encoding that reads them, keys at its `cached_position`

    def __call__(self, query: Tensor, key: Tensor, m: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """Turn queries, (batch, heads, queries, head_dim), at m and keys at n; positions are (batch or 1, length)."""
        return self._turned(query, m, self.own, self.encoding.rotation), self._turned(
            key, n, self.own.of_keys, self.encoding.rotation and self.encoding.rotation.of_keys
        )

    def _turned(self, x: Tensor, p: Tensor, own: Rotation, target: Rotation | None) -> Tensor:
        if self.frequencies is not None:
            x = own.turn(x, p, self.frequencies, self.factor)
        cached = self.encoding.cached_position(p)
        return x if target is None or cached is p else target.turn(x, moved(cached, p))


def install_parts(model: nn.Module, state: State, every: Sequence[RotaryTable]) -> None:
    """Give each choice of layers its methods; all of them compute attention, and the model's rotary modules stay."""
    install_attention(model, state, every, every, give=_give_parts)


def _give_parts(
    layers: Sequence[CalibratedLayer],
    tables: Sequence[RotaryTable],
    wrappers: Wrappers,
    state: State,
    native: str | None,
    own: Mapping[nn.Module, OwnTemperature | None],
) -> None:
    for wrapper in wrappers.values():
        wrapper.encoding = None  # every key is cached at its own position
    for layer in layers:
        if layer.beside is not None:
            raise UnsupportedModelError(
                f"{layer.name} reads two texts in one softmax, where layers cannot have methods of their own. Give one "
                'method, with layers="full", "all", "encoder" or "decoder".'
            )
        Layer(plain_encoding(layer, state.original), native=native).attach(layer.module)
    for part in state.parts:
        chosen = _chosen(layers, part)
        scaled = {layer.name: own[layer.module] for layer in chosen if layer.module in own}
        refuse_own(scaled if of_queries(part.methods) else {}, replace=state.config.replace)
        for layer in chosen:
            methods = part.methods if layer.table is not None else of_queries(part.methods)
            encoding, turn = _encoding(layer, methods, part)
            if (before := scaled.get(layer.name)) is not None:
                encoding = replace(encoding, own_factor=before.factor)
            Layer(encoding, True, native=native, turn=turn).attach(layer.module)


def _chosen(layers: Sequence[CalibratedLayer], part: LayerPart) -> list[CalibratedLayer]:
    """Return the layers of a part in which its methods change something; raise if there are none, or a number lacks."""
    anywhere = bool(of_queries(part.methods))
    able = [layer for layer in layers if layer.table is not None or anywhere]
    found = [layer for layer in able if layer_index(layer.name, layer.module) in part.layers]
    if part.strict or not found:
        refuse_missing(part.methods, part.layers, able)
    return found


def _encoding(
    layer: CalibratedLayer, methods: Sequence[Method], part: LayerPart
) -> tuple[Encoding, Turn | None]:
    """Return the encoding of one layer, and the turn that queries and keys need before it."""
    static = [
        m for m in methods if isinstance(m, RopeScaling) and not isinstance(m, LengthDependent)
    ]
    moving = [method for method in methods if isinstance(method, LengthDependent)]
    others = [method for method in methods if method not in static]
    rotation, frequencies, factor = layer.rotation, None, 1.0
    if static and layer.table is not None and rotation is not None:
        (scaling,) = static
        dropped = (
            layer.table.scaled and not part.compose and layer.table.parameters.get("mscale_all_dim")
        )
        if dropped or (isinstance(scaling, YaRN) and scaling.mscale_all_dim):
            raise UnsupportedModelError(
                f"{layer.name}: mscale_all_dim changes the softmax scale of attention modules, which hf_posenc does "
                "for whole models only. Choose all layers, or compose=True."
            )
        spec = read_spec(layer.table, part.original, compose=part.compose)
        check_frequencies(scaling, spec)
        table = scaling.frequencies(spec).float()
        table = table if spec.order is None else table[spec.order]
        table = table if rotation.order is None else table[rotation.order]
        factor = float(scaling.cos_sin_factor(spec)) * (rotation.factor if part.compose else 1.0)
        frequencies = table.to(rotation.inv_freq.device) - rotation.inv_freq
        rotation = _scaled(rotation, table, factor)
        factor = factor / layer.rotation.factor if layer.rotation is not None else factor
    base = Encoding.of(others, part.original)
    scaled = replace(layer, rotation=rotation)
    encoding = encoding_of(base, scaled, others, compose=part.compose)
    if layer.rotation is None or needs_no_rotation(methods) or (moving and frequencies is None):
        return encoding, None
    return encoding, Turn(layer.rotation, frequencies, factor, encoding)


def _scaled(rotation: Rotation, table: Tensor, factor: float) -> Rotation:
    keys = rotation.keys and _scaled(rotation.keys, table, factor)
    return replace(rotation, inv_freq=table.to(rotation.inv_freq.device), factor=factor, keys=keys)
