# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which part of which decoder layer a launch belongs to, told by the weights that it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from metrale.bench.floors import Call
from metrale.nllb.device_weights import Dense, DeviceWeights

OF_OPS: Final[Mapping[str, str]] = {
    "embed": "feed, embedding",
    "kv_scatter": "KV write",
    "argmax": "choice",
    "sample": "choice",
    "join_maxima": "choice",
    "beam_candidates": "choice",
    "beam_select": "choice",
}
"""The part of ops that read no layer's weights. An op that is not here is a part of its own."""

_ADAPTERS: Final = ("lora_down", "lora_up")


class Place(NamedTuple):
    """Where in a step something belongs: ``layer`` is None outside of the layers."""

    layer: int | None
    part: str


def places(weights: DeviceWeights, calls: Sequence[Call]) -> list[Place]:
    """Return where each launch of a decoder pass, and of the choice after it, belongs.

    What has a weight of a layer is that weight's part, as `metrale.nllb.device_weights.DecoderLayer` calls it, whatever
    else the launch does besides. What has none is in the layer of the launch before it.
    """
    known = _addresses(weights)
    found = []
    last = Place(None, "")
    for call in calls:
        name = call.spec.name
        values = zip(call.spec.args, call.values, strict=True)
        own = next((known.get(int(value)) for arg, value in values if arg.name == "weight"), None)
        if own is not None:
            place = own
        elif name == "decode_attention":
            which = "self" if call.label.startswith("decode_attention self") else "cross"
            place = Place(last.layer, f"{which}-attention")
        elif name in _ADAPTERS:
            place = Place(last.layer, f"{last.part.removesuffix(' adapters')} adapters")
        else:
            part = OF_OPS.get(name, name)
            place = Place(None if part in ("choice", OF_OPS["embed"]) else last.layer, part)
        found.append(place)
        last = place
    return found


def _addresses(weights: DeviceWeights) -> dict[int, Place]:
    """Return the places of the decoder's matrices, and of its norms' vectors, by their addresses."""
    found = {int(weights.decoder_norm.weight): Place(None, "final norm"), int(weights.head.weight): Place(None, "head")}
    for index, layer in enumerate(weights.decoder):
        for field in dataclasses.fields(layer):
            dense = getattr(layer, field.name)
            if isinstance(dense, Dense):
                found[int(dense.weight)] = Place(index, field.name.replace("_", " "))
    return found
