# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mutants of what tells the models of the family apart: their configuration, their matrices and their padding."""

from __future__ import annotations

from tests.mutation.mutant import Mutant
from tests.mutation.rules import rules

_CONFIG = ("tests/nllb/test_config.py", "tests/family", "-k", "not live")
_TABLES = ("tests/nllb/test_embeddings.py", "tests/nllb/test_weights.py", "tests/family", "-k", "not live")
_NUMBERS = ("tests/family/test_recorded.py",)

FAMILY_MUTANTS: list[Mutant] = [
    *rules(
        "configuration",
        "metrale.nllb.config",
        _CONFIG,
        ('"gelu_python": "gelu"', '"gelu_python": "gelu_tanh"'),
        ('"gelu_fast": "gelu_tanh"', '"gelu_fast": "gelu"'),
        ('"gelu_accurate": "gelu_tanh"', '"gelu_accurate": "gelu"'),
        ('"gelu_python_tanh": "gelu_tanh"', '"gelu_python_tanh": "silu"'),
        ('"linear": "none"', '"linear": "relu"'),
        ('"linear": "none",', '"linear": "none",\n        "quick_gelu": "gelu",'),
        ("if config.get(key) is not None:\n            reader.p", "if config.get(key):\n            reader.p"),
        ("        config = _with_ids(config, generation or {})\n", ""),
        ("            found[key] = generation.get(key)\n", "            found[key] = 2\n"),
        ("if key in found and found[key] is None:", "if found.get(key) is None:"),
        ('        first = generation.get("bos_token_id")\n', "        first = None\n"),
        ("bos is None or not only_text else bos", "bos is None or only_text else bos"),
        ("bos is None or not only_text else bos", "not only_text else model.decoder_start_token_id"),
        ('is None and said.get("bos_token_id") is not None', 'is None and "bos_token_id" in said'),
        ("said = config if generation is None else generation", "said = generation or {}"),
        ("said = config if generation is None else generation", "said = config"),
        ('default.encoder_layers, 0, MAX_LAYERS, alias="num_hidden_layers"', "default.encoder_layers, 0, MAX_LAYERS"),
        ('"d_model", default.d_model, 4, MAX_D_MODEL', '"d_model", default.d_model, 3, MAX_D_MODEL'),
        ('"d_model", default.d_model, 4, MAX_D_MODEL', '"d_model", default.d_model, 5, MAX_D_MODEL'),
        ('"nllb-moe": "a mixture of experts"', '"nllb_moe": "a mixture of experts"'),
        ("if self.scale_embedding else 1.0", "if self.d_model else 1.0"),
    ),
    *rules(
        "configuration",
        "metrale.checkpoint.json_fields",
        ("tests/checkpoint/test_json_file.py", *_CONFIG),
        ("            key = alias\n", "            pass\n"),
        ("if alias is not None and alias in self._fields:", "if alias in self._fields and key not in self._fields:"),
    ),
    *rules(
        "embeddings",
        "metrale.nllb.embeddings",
        _TABLES,
        (
            "(EMBEDDING, HEAD, DECODER_EMBEDDING, ENCODER_EMBEDDING)",
            "(HEAD, EMBEDDING, DECODER_EMBEDDING, ENCODER_EMBEDDING)",
        ),
        (
            "(EMBEDDING, HEAD, DECODER_EMBEDDING, ENCODER_EMBEDDING)",
            "(EMBEDDING, ENCODER_EMBEDDING, DECODER_EMBEDDING, HEAD)",
        ),
        ("Tables(ENCODER_EMBEDDING, DECODER_EMBEDDING, HEAD)", "Tables(DECODER_EMBEDDING, ENCODER_EMBEDDING, HEAD)"),
        ("Tables(ENCODER_EMBEDDING, DECODER_EMBEDDING, HEAD)", "Tables(ENCODER_EMBEDDING, HEAD, DECODER_EMBEDDING)"),
        ("    elif not config.tie_word_embeddings:\n", "    elif not given:\n"),
        ("        given.pop(EMBEDDING, None)  # nothing reads it\n", "        pass\n"),
        ("[shared if _same(checkpoint, info, shared) else info for", "[info for"),
        ("[shared if _same(checkpoint, info, shared) else info for", "[shared for"),
        ("        return [given[own] for own in _OWN_NAMES]\n", "        pass\n"),
        ("tuple(dict.fromkeys(info.name for info in used))", "(used[0].name,)"),
        ("tuple(dict.fromkeys(info.name for info in used))", "()"),
        ("stored.pop(name) for name in STORED_NAMES", "stored[name] for name in STORED_NAMES"),
        ("name = equal or (own", "name = (own"),
        ("    if first.dtype != other.dtype:\n        return False\n", ""),
        (".any():\n            return False", ".all():\n            return False"),
        ("(rows.view(bits) != others.view(bits))", "(rows != others)"),
        ("start, start + len(rows))", "0, len(rows))"),
        ("info.rows != first.rows", "info.rows < first.rows"),
        ("first.rows <= most", "first.rows < most"),
        ("            faulty = True\n", ""),
        ("tuple(dict.fromkeys(self))", "tuple(self)"),
    ),
    *rules(
        "embeddings",
        "metrale.nllb.device_weights",
        _TABLES,
        ("for name in shape.tables)", "for name in reversed(shape.tables))"),
        ("target_embedding=target", "target_embedding=source"),
        ("head=Dense(head,", "head=Dense(target,"),
        ("canonical_shapes(shape.config, shape.vocab, shape.tables)", "canonical_shapes(shape.config, shape.vocab)"),
        (
            "    for region, names in regions(shape.config, shape.tables):\n        layout",
            "    for region, names in regions(shape.config):\n        layout",
        ),
    ),
    *rules(
        "embeddings",
        "metrale.nllb.decoder",
        _NUMBERS,
        ("weights.target_embedding", "weights.source_embedding"),
        ("weights.weight", "self._weights.target_embedding"),
    ),
    *rules("embeddings", "metrale.nllb.encoder", _NUMBERS, ("weights.source_embedding", "weights.target_embedding")),
    *rules(
        "embeddings",
        "metrale.nllb.weights",
        _TABLES,
        ("inner.startswith(_OUTER_PREFIXES)", "inner.startswith(_PREFIX)"),
        (
            "inner != name and inner.startswith(_OUTER_PREFIXES)",
            "inner != name and inner.startswith(_OUTER_PREFIXES[1:])",
        ),
        ('"model.decoder.embed_positions._float_tensor",', '"model.decoder.embed_positions._floats",'),
        ("if name in tables.names:", "if name == tables.encoder:"),
    ),
    *rules(
        "embeddings",
        "metrale.factory",
        _TABLES,
        ("        weights.tables,\n", ""),
    ),
    *rules(
        "padding",
        "metrale.nllb.encoder",
        _NUMBERS,
        ("ids == self._shape.config.pad_token_id", "ids == 1"),
        ("ids == self._shape.config.pad_token_id", "ids == -1"),
        ("np.cumsum(padding) - padding", "0 * padding"),
        ("(skipped - skipped[first])", "skipped"),
        ("np.arange(len(ids)) - positions", "np.arange(len(ids)) * 0"),
        ('rows.embed(table["ids"], table["places"]', 'rows.embed(table["ids"], table["positions"]'),
        ('spans"], table["positions"])', 'spans"], table["places"])'),
    ),
    *rules(
        "padding",
        "metrale.nllb.layers",
        _NUMBERS,
        ("blank=shape.config.pad_token_id", "blank=1"),
        ("            blank=shape.config.pad_token_id,\n", ""),
    ),
]
