# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mutants of the model's rules: positions, languages, slots and rows, the KV cache, weights, the choice of tokens."""

from __future__ import annotations

from tests.mutation.mutant import Mutant


def _files(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/nllb/test_model_{name}.py" for name in names)


# Those that notice first stand first; the slow ones about memory have nothing to say about these rules.
_NUMBERS = (*_files("logits"), "-k", "not float16")
_STATE = _files("rows", "sequences", "limits", "refusals", "reading", "failures", "memory", "factory", "streams")
_BOTH = (*_STATE, *_files("batching"), *_NUMBERS)


def _rules(group: str, module: str, tests: tuple[str, ...], *changes: tuple[str, str]) -> list[Mutant]:
    return [Mutant(group, module, old, new, tests) for old, new in changes]


MODEL_MUTANTS: list[Mutant] = [
    *_rules(
        "positions",
        "metrale.nllb.positions",
        _NUMBERS,
        ("np.arange(first, first + count)", "np.arange(first + 1, first + 1 + count)"),
        ("(half - 1)", "half"),
        ("-math.log(10000.0)", "math.log(10000.0)"),
        ("math.log(10000.0)", "math.log(1000.0)"),
        ("table[:, :half] = np.sin(angles)", "table[:, :half] = np.cos(angles)"),
        ("table[:, half : 2 * half] = np.cos(angles)", "table[:, half : 2 * half] = -np.cos(angles)"),
        ("table = np.zeros(", "table = np.ones("),
    ),
    *_rules(
        "positions",
        "metrale.nllb.device_weights",
        _NUMBERS,
        ("sinusoidal(config.pad_token_id + 1 + start", "sinusoidal(config.pad_token_id + start"),
        ("sinusoidal(config.pad_token_id + 1 + start", "sinusoidal(2 + start"),
    ),
    *_rules(
        "positions",
        "metrale.nllb.encoder",
        _NUMBERS,
        ("np.concatenate([np.arange(length) for length in lengths])", "np.arange(lengths.sum())"),
        ("np.arange(length) for length", "np.arange(length)[::-1] for length"),
        ("np.concatenate([[0], np.cumsum(lengths)])", "np.concatenate([[0], np.cumsum(lengths[::-1])])"),
        ("scale=config.encoder_head_dim**-0.5", "scale=config.decoder_head_dim**-0.5"),
        ("scale=config.encoder_head_dim**-0.5", "scale=1.0"),
        ("rows.wide.offset(step),", "rows.wide.offset(2 * step),"),
        ("heads=config.encoder_attention_heads", "heads=config.decoder_attention_heads"),
    ),
    *_rules(
        "positions",
        "metrale.nllb.decoder",
        _NUMBERS,
        ("feed.first + step for feed", "feed.first for feed"),
        ("feed.first + step for feed", "feed.first + step + 1 for feed"),
        ("self_lengths=positions + 1", "self_lengths=np.maximum(positions, 1)"),
        ("self_lengths=positions + 1", "self_lengths=np.repeat(positions[depth - 1 :: depth] + 1, depth)"),
        ("cross_lengths=np.repeat([feed.span.source_len for", "cross_lengths=np.repeat([feed.span.source_len - 1 for"),
        ("scale=config.decoder_head_dim**-0.5", "scale=config.encoder_head_dim**-0.5"),
        ("heads=config.decoder_attention_heads", "heads=config.encoder_attention_heads"),
        ("(depth - 1) * d * shape.itemsize", "0 * d * shape.itemsize"),
        ("x_stride=depth * d", "x_stride=d"),
    ),
    *_rules(
        "KV cache",
        "metrale.nllb.decoder",
        _NUMBERS,
        ("int(feed.span.target_ptr)", "int(feed.span.ptr)"),
        ("[int(feed.span.ptr) for", "[int(feed.span.target_ptr) for"),
        ("keys = index * 2 * d", "keys = 0 * 2 * d"),
        ("keys = index * 2 * d", "keys = index * d"),
        ("v_offset=keys + config.d_model", "v_offset=keys"),
        ("offset=keys,\n            kv_stride", "offset=0,\n            kv_stride"),
        ("rows.wide.offset(d * self._shape.itemsize)", "rows.wide"),
        ("width=2 * d,", "width=d,"),
        ('table["self_spans"], table["self_lengths"]', 'table["cross_spans"], table["cross_lengths"]'),
        ('table["cross_spans"], table["cross_lengths"], d, keys', 'table["cross_spans"], table["cross_lengths"], d, 0'),
    ),
    *_rules(
        "KV cache",
        "metrale.nllb.kv",
        _BOTH,
        ("self.source_len * self.position_bytes", "0 * self.position_bytes"),
        ("first = start + length", "first = start"),
        ("if start - first >= positions", "if start - first >= positions - 1"),
        ("if first + positions > self.capacity", "if first + positions > self.capacity + 1"),
        ("if first + positions > self.capacity", "if first + positions >= self.capacity"),
        ("        self._taken.remove((span.first, span.positions))\n", "        pass\n"),
        ("self.base.offset(first * self._position_bytes)", "self.base"),
        ("self.capacity = nbytes // position_bytes", "self.capacity = nbytes // position_bytes - 1"),
    ),
    *_rules(
        "KV cache",
        "metrale.nllb.encoder",
        _BOTH,
        (
            "np.repeat(np.array([int(span.ptr) for span in spans]",
            "np.repeat(np.array([int(spans[0].ptr) for span in spans]",
        ),
        ("spans.offset(first * 8)", "spans"),
        ("positions.offset(first * 4)", "positions"),
        ("rows.h.offset(first * d * shape.itemsize)", "rows.h"),
        ("        rows.norm(weights.encoder_norm)\n", ""),
    ),
    *_rules(
        "languages",
        "metrale.nllb.admission",
        _BOTH,
        ("source = (source_language, *tokens, self", "source = (*tokens, source_language, self"),
        ("source = (source_language, *tokens, self", "source = (target_language, *tokens, self"),
        ("*tokens, self._shape.config.eos_token_id[0])", "*tokens)"),
        ("self._shape.config.eos_token_id[0])", "2)"),
        ('seq.src_lang_id, self._languages.source, "source"', 'seq.src_lang_id, self._languages.target, "source"'),
        ('seq.tgt_lang_id, self._languages.target, "target"', 'seq.src_lang_id, self._languages.target, "target"'),
        ("        if language:\n            return language\n", ""),
        (
            "return Prompt(one.seq, span, source, target_language)",
            "return Prompt(one.seq, span, source, source_language)",
        ),
    ),
    *_rules(
        "languages",
        "metrale.nllb.model",
        _BOTH,
        ("Feed((start, prompt.target), 0", "Feed((prompt.target, start), 0"),
        ("start = self.config.generation.decoder_start_token_id", "start = 2"),
    ),
    *_rules(
        "slots and rows",
        "metrale.nllb.admission",
        _BOTH,
        ("if seq.seq_len >= most", "if seq.seq_len > most"),
        ("if len(source) > most", "if len(source) > most + 1"),
        ("len({id(seq) for seq in seqs}) < len(seqs)", "False"),
        ("span.positions - span.source_len)", "span.positions)"),
        ("span.positions - PREFIX_LEN)", "span.positions)"),
        ("if not span.source_len or not seq.seq_len:", "if False:"),
        ("one.chunk_start != 0 or not", "not"),
    ),
    *_rules(
        "slots and rows",
        "metrale.nllb.model",
        _BOTH,
        (
            "self.shape.limits.max_batch + seq.slot_idx, stream)[0]\n\n    def prefill_chunk",
            "seq.slot_idx, stream)[0]\n\n    def prefill_chunk",
        ),
        ("return self._prefill(prompts, first, stream)", "return self._prefill(prompts, 0, stream)"),
        (
            "return self.prefill_batch_chunk_rows(streams, stream, 0)",
            "return self.prefill_batch_chunk_rows(streams, stream, 1)",
        ),
        ('integer("row_base", row_base, 0, most, expected)', 'integer("row_base", row_base, 0, most + 1, expected)'),
        ("self._logits.written(0, len(feeds), stream)", "self._logits.written(0, 1, stream)"),
        ("self._logits.written(row, len(prompts), stream)", "pass"),
        ("seq.seq_len += 1", "seq.seq_len += 2"),
        ("seq.tokens.append(token)", "seq.tokens.insert(0, token)"),
        ("prompt.seq.tokens = [start, prompt.target]", "prompt.seq.tokens = [prompt.target]"),
        ("len(seqs) > self.shape.limits.max_batch", "False"),
        ("prompt.span.source_len = len(prompt.source)", "prompt.span.source_len = len(prompt.source) + 1"),
        ("            seq.slot_idx = SequenceState.DETACHED\n", "            pass\n"),
        ("            self.free_sequence(seq)\n            seq.slot_idx", "            seq.slot_idx"),
        ("not self._table.owns(seq) and not seq.is_detached", "False"),
        ("groups[-1].append(prompt)", "groups[0].append(prompt)"),
    ),
    *_rules(
        "slots and rows",
        "metrale.nllb.sequences",
        _STATE,
        ("entry is not None and entry[0] is seq", "entry is not None"),
        ("            self._pool.give_back(span)\n", ""),
        ("        if slot in self._live:\n", "        if False:\n"),
        ("        del self._live[seq.slot_idx]\n", ""),
        ("        seq.slot_idx = slot\n", ""),
        ("if slot is None:", "if slot is None and False:"),
        ("self._live[slot] = (seq, span)\n        return seq", "return seq"),
    ),
    *_rules(
        "slots and rows",
        "metrale.nllb.logits",
        _STATE,
        ("np.full(stride, -np.inf", "np.full(stride, 0.0"),
        ("self._event_of_row[first : first + count] = [event] * count", "self._event_of_row[first] = event"),
        ('count * dtypes.itemsize("i32")', '0 * dtypes.itemsize("i32")'),
        ("np.flatnonzero(result[1])", "np.flatnonzero(result[1] * 0)"),
        ("vocab=self.arena.vocab", "vocab=self.arena.vocab - 1"),
    ),
    *_rules(
        "slots and rows",
        "gpu_runtime.arena",
        (*_STATE, "tests/gpu_runtime/test_arena.py"),
        ("return self.base.offset(position * self.row_bytes)", "return self.base"),
        ("self.padded(self.vocab)\n", "self.vocab\n"),
        ("index + rows > self.rows", "index + rows > self.rows + 1"),
        ("if rest or not", "if not"),
    ),
    *_rules(
        "layers",
        "metrale.nllb.layers",
        _NUMBERS,
        ("LAYER_NORM_EPS: Final = 1e-5", "LAYER_NORM_EPS: Final = 1e-4"),
        ("scale=shape.config.embed_scale", "scale=1.0"),
        ("activation=config.activation_function", 'activation="relu"'),
        (
            "self.dense(self.h, out, self.x, self.shape.config.d_model, residual=True)",
            "self.dense(self.h, out, self.x, self.shape.config.d_model)",
        ),
        (
            "self.dense(self.wide, fc2, self.x, config.d_model, width, residual=True)",
            "self.dense(self.wide, fc2, self.x, config.d_model, width)",
        ),
        ("        self.norm(norm)\n", ""),
    ),
    *_rules(
        "weights",
        "metrale.nllb.device_weights",
        _NUMBERS,
        ('"cross_q": (names.cross_attn.q,)', '"cross_q": (names.cross_attn.k,)'),
        ('"cross_out": (names.cross_attn.out,)', '"cross_out": (names.self_attn.out,)'),
        ('"cross_norm": (names.cross_attn_norm,)', '"cross_norm": (names.self_attn_norm,)'),
        ('"encoder.norm": (ENCODER_NORM,)', '"encoder.norm": (DECODER_NORM,)'),
        ('"decoder.norm": (DECODER_NORM,)', '"decoder.norm": (ENCODER_NORM,)'),
        ("at = at.offset(data.nbytes)", "at = at.offset(0)"),
        (
            'for affine in affines)\n        yield f"{region}.bias"',
            'for affine in affines[::-1])\n        yield f"{region}.bias"',
        ),
    ),
]
