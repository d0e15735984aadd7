# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mutants of the model's rules: positions, languages, slots and rows, the KV cache, weights, the choice of tokens.

Those of what comes before loading are in `tests.mutation.folder_mutants`, those of what tells the models of the family
apart in `tests.mutation.family_mutants`, those of what serves many sequences at once in
`tests.mutation.serving_mutants`, those of beam search in `tests.mutation.search_mutants`, those of the order of work in
`tests.mutation.order_mutants`, those of what is told of a translation in `tests.mutation.translator_mutants`.
"""

from __future__ import annotations

from tests.mutation.adapter_mutants import ADAPTER_MUTANTS
from tests.mutation.checkpoint_mutants import CHECKPOINT_MUTANTS
from tests.mutation.engine_mutants import ENGINE_MUTANTS
from tests.mutation.family_mutants import FAMILY_MUTANTS
from tests.mutation.folder_mutants import FOLDER_MUTANTS
from tests.mutation.hostile_mutants import HOSTILE_MUTANTS
from tests.mutation.mutant import Mutant
from tests.mutation.rules import files, rules
from tests.mutation.search_mutants import SEARCH_MUTANTS
from tests.mutation.serving_mutants import SERVING_MUTANTS
from tests.mutation.tokenizer_mutants import TOKENIZER_MUTANTS
from tests.mutation.translator_mutants import TRANSLATOR_MUTANTS

# Those that notice first stand first; the slow ones about memory have nothing to say about these rules.
_NUMBERS = (*files("logits"), "-k", "not float16")
_STATE = (
    *files("rows", "mixed", "sequences", "limits", "refusals", "reading", "failures", "memory", "factory"),
    *files("streams", "threads"),
)
_BOTH = (*_STATE, *files("batching"), *_NUMBERS)


MODEL_MUTANTS: list[Mutant] = [
    *rules(
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
    *rules(
        "positions",
        "metrale.nllb.device_weights",
        _NUMBERS,
        ("shape.config.pad_token_id + 1\n", "shape.config.pad_token_id\n"),
        ("shape.config.pad_token_id + 1\n", "2\n"),
    ),
    *rules(
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
    *rules(
        "positions",
        "metrale.nllb.decoder",
        _NUMBERS,
        ("in enumerate(ids, first):", "in ((first, one) for one in ids):"),
        ("in enumerate(ids, first):", "in enumerate(ids, first + 1):"),
        ("position, position + 1, length)", "position, max(position, 1), length)"),
        ("position, position + 1, length)", "position, first + len(ids), length)"),
        ("length = span.source_len or 1", "length = max(span.source_len - 1, 1)"),
        ("scale=config.decoder_head_dim**-0.5", "scale=config.encoder_head_dim**-0.5"),
        ("heads=config.decoder_attention_heads", "heads=config.encoder_attention_heads"),
        ("(work.depth - 1) * d * shape.itemsize", "0 * d * shape.itemsize"),
        ("x_stride=work.depth * d", "x_stride=d"),
    ),
    *rules(
        "KV cache",
        "metrale.nllb.decoder",
        _NUMBERS,
        ("own = span.target()", "own = source"),
        ("source = int(span.ptr)", "source = span.target()"),
        ("keys = index * 2 * d", "keys = 0 * 2 * d"),
        ("keys = index * 2 * d", "keys = index * d"),
        ("v_offset=keys + config.d_model", "v_offset=keys"),
        ("offset=keys,\n            kv_stride", "offset=0,\n            kv_stride"),
        ("rows.wide.offset(d * self._shape.itemsize)", "rows.wide"),
        ("width=2 * d,", "width=d,"),
        ('table["self_spans"], table["self_lengths"]', 'table["cross_spans"], table["cross_lengths"]'),
        ('table["cross_spans"], table["cross_lengths"], d, keys', 'table["cross_spans"], table["cross_lengths"], d, 0'),
    ),
    *rules(
        "KV cache",
        "metrale.nllb.kv",
        _BOTH,
        ("(self.source_len + beam", "(0 + beam"),
        ("first = start + length", "first = start"),
        ("if start - first >= positions", "if start - first >= positions - 1"),
        ("if first + positions > self.capacity", "if first + positions > self.capacity + 1"),
        ("if first + positions > self.capacity", "if first + positions >= self.capacity"),
        ("        self._taken.remove((span.first, span.positions))\n", "        pass\n"),
        ("self.base.offset(first * self._position_bytes)", "self.base"),
        ("self.capacity = nbytes // position_bytes", "self.capacity = nbytes // position_bytes - 1"),
    ),
    *rules(
        "KV cache",
        "metrale.nllb.encoder",
        _BOTH,
        (
            "np.repeat(np.array([int(span.ptr) for span in spans]",
            "np.repeat(np.array([int(spans[0].ptr) for span in spans]",
        ),
        ("spans.offset(first * 8)", "spans"),
        ("positions.offset(first * 4)", "positions"),
        ("rows.part(first, count)", "rows.part(0, count)"),
        ("        rows.norm(weights.encoder_norm)\n", ""),
    ),
    *rules(
        "languages",
        "metrale.nllb.admission",
        _BOTH,
        ("framed(source_language, tokens", "framed(target_language, tokens"),
        ("eos = self._shape.config.eos_token_id[0]", "eos = 2"),
        ('asked.src_lang_id, self._languages.source, "source"', 'asked.src_lang_id, self._languages.target, "source"'),
        ('asked.tgt_lang_id, self._languages.target, "target"', 'asked.src_lang_id, self._languages.target, "target"'),
        ("        if language:\n            return language\n", ""),
        ("decoder_start_token_id, target_language, *given)", "decoder_start_token_id, source_language, *given)"),
        ("(self._shape.config.generation.decoder_start_token_id, target", "(2, target"),
    ),
    *rules(
        "languages",
        "metrale.nllb.passes",
        _BOTH,
        ("Feed(prompt.prefix[first : first + most]", "Feed(prompt.prefix[first : first + most][::-1]"),
    ),
    *rules(
        "slots and rows",
        "metrale.nllb.admission",
        _BOTH,
        ("if seq.seq_len == most:", "if False:"),
        ("if len(source) > most", "if len(source) > most + 1"),
        ("len({id(seq) for seq in seqs}) < len(seqs)", "False"),
        ("return span.positions - prefix\n", "return span.positions\n"),
        ("if not span.source_len or seq.seq_len < 1:", "if False:"),
        ("if not span.source_len or seq.seq_len < 1:", "if not span.source_len:"),
        ("(start, length, last) != (0, len(tokens), True)", "(length, last) != (len(tokens), True)"),
    ),
    *rules(
        "slots and rows",
        "metrale.nllb.forward_calls",
        _BOTH,
        ("return self.shape.limits.max_batch + seq.slot_idx", "return seq.slot_idx"),
        (
            "return self.prefill_batch_chunk_rows(streams, stream, 0)",
            "return self.prefill_batch_chunk_rows(streams, stream, 1)",
        ),
        (
            'integer("row_base", row_base, 0, rows - len(streams), expected)',
            'integer("row_base", row_base, 0, rows - len(streams) + 1, expected)',
        ),
        ("seq.seq_len += 1", "seq.seq_len += 2"),
        ("seq.tokens.append(feed.ids[0])", "seq.tokens.insert(0, feed.ids[0])"),
        ("prompt.seq.tokens = list(prompt.prefix)", "prompt.seq.tokens = list(prompt.prefix[::-1])"),
        ("prompt.seq.seq_len = prompt.seq.prompt_len = len", "prompt.seq.seq_len = len"),
        ("not 1 <= len(seqs) <= most or", "not 1 <= len(seqs) or"),
    ),
    *rules(
        "slots and rows",
        "metrale.nllb.passes",
        files("prefix"),
        (
            "groups[-1].append(prompt)\n        return groups\n\n    def _encoder",
            "groups[0].append(prompt)\n        return groups\n\n    def _encoder",
        ),
    ),
    *rules(
        "slots and rows",
        "metrale.nllb.passes",
        _BOTH,
        ("rows.written(self.decoding, 0, len(feeds))", "rows.written(self.decoding, 0, 1)"),
        ("self._logits.written(self.prefilling, row, len(prompts))", "pass"),
        ("source_len, prompt.span.fresh = len(prompt.source), True", "source_len = len(prompt.source) + 1"),
        ("groups[-1].append(prompt)\n            room", "groups[0].append(prompt)\n            room"),
        ("prompt.seq.tokens, prompt.seq.seq_len, prompt.seq.prompt_len = [], 0, 0", "pass"),
    ),
    *rules(
        "slots and rows",
        "metrale.nllb.lifecycle_calls",
        _STATE,
        ("            seq.slot_idx = SequenceState.DETACHED\n", "            pass\n"),
        ("            self.free_sequence(seq)\n            seq.slot_idx", "            seq.slot_idx"),
        ("not self._table.owns(seq) and not seq.is_detached", "False"),
        ("                self._table.move(seq, slot)\n", ""),
    ),
    *rules(
        "slots and rows",
        "metrale.nllb.sequences",
        _STATE,
        ("if entry is not None and entry[0] is seq else None", "if entry is not None else None"),
        ("            self._pool.give_back(span)\n", ""),
        ("if slot in self._live and slot != seq.slot_idx:", "if False:"),
        ("if slot in self._live and slot != seq.slot_idx:", "if slot in self._live:"),
        ("self._live[slot] = self._live.pop(seq.slot_idx)", "self._live[slot] = self._live[seq.slot_idx]"),
        ("        seq.slot_idx = slot\n", ""),
        (
            "            if slots == 1:\n                raise",
            "            if slots == 1:\n                pass\n            if False:\n                raise",
        ),
        ("            self._live[slot] = (seq, span)\n", "            pass\n"),
    ),
    *rules(
        "slots and rows",
        "metrale.nllb.logits",
        _STATE,
        ("np.full(arena.row_elements, -np.inf", "np.full(arena.row_elements, 0.0"),
        ("filled += count", "filled += 2 * count"),
        ("self._writers[row : row + count] = [writer] * count", "self._writers[row] = writer"),
        ('count * dtypes.itemsize("i32")', '0 * dtypes.itemsize("i32")'),
        ("np.flatnonzero(result[1])", "np.flatnonzero(result[1] * 0)"),
        ("vocab=self.arena.vocab", "vocab=self.arena.vocab - 1"),
    ),
    *rules(
        "slots and rows",
        "gpu_runtime.arena",
        (*_STATE, "tests/gpu_runtime/test_arena.py"),
        ("return self.base.offset(position * self.row_bytes)", "return self.base"),
        ("self.padded(self.vocab)\n", "self.vocab\n"),
        ("index + rows > self.rows", "index + rows > self.rows + 1"),
        ("if rest or not", "if not"),
    ),
    *rules(
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
    *rules(
        "weights",
        "metrale.nllb.device_weights",
        _NUMBERS,
        ('"cross_q": (names.cross_attn.q,)', '"cross_q": (names.cross_attn.k,)'),
        ('"cross_out": (names.cross_attn.out,)', '"cross_out": (names.self_attn.out,)'),
        ('"cross_norm": (names.cross_attn_norm,)', '"cross_norm": (names.self_attn_norm,)'),
        ('"encoder.norm": (ENCODER_NORM,)', '"encoder.norm": (DECODER_NORM,)'),
        ('"decoder.norm": (DECODER_NORM,)', '"decoder.norm": (ENCODER_NORM,)'),
        (
            'for affine in affines)\n        yield f"{region}.bias"',
            'for affine in affines[::-1])\n        yield f"{region}.bias"',
        ),
    ),
    *rules(
        "staging",
        "metrale.nllb.staging",
        ("tests/nllb/test_staging.py",),
        ("self._gpu.copy_h2d_on_stream(slot", "self._gpu.copy_h2d_async(slot"),
        ("fill(part.start, room)", "fill(0, room)"),
        ("transfer.at.offset(done * itemsize)", "transfer.at"),
        ("slot[part.offset : part.end]", "slot[: part.end - part.offset]"),
        ("if stop and (part.offset != stop or", "if stop and ("),
        (" or part.at - at != stop - start)", ")"),
        ("-(-end // REGION_ALIGNMENT) * REGION_ALIGNMENT", "end"),
        ("            done += count\n", "            done += count + 1\n"),
        ("if slot_bytes - used < itemsize:", "if slot_bytes - used < 0:"),
        ("    if parts:\n        yield parts", "    if parts and False:\n        yield parts"),
        ("            jobs.stop()\n", "            pass\n"),
        ("        self.stop()\n", "        pass\n"),
        ("raise min(self._failures", "raise max(self._failures"),
        ("            self._gpu.event_synchronize(event)\n", "            pass\n"),
        ("if not self._gpu.event_query(event):", "if self._gpu.event_query(event):"),
        ("        self._gpu.record_event(self._events[self._next], stream)\n", ""),
        ("self._next = (self._next + 1) % len(self.slots)", "self._next = 0"),
        ("undo.callback(gpu.destroy_stream, self._lanes[-1][1])", "undo.callback(gpu.default_stream)"),
    ),
    *rules(
        "staging",
        "metrale.nllb.workspace",
        ("tests/nllb/test_model_resources.py",),
        ("max(shape.gemm_workspace_bytes, need) for", "shape.gemm_workspace_bytes for"),
        ("max(shape.gemm_workspace_bytes, need) for", "need for"),
        (
            '"prefix": spaces["prefill"], "decoder": spaces["decoder"]',
            '"prefix": spaces["prefill"], "decoder": spaces["prefill"]',
        ),
        ("        self._ring.free()\n", "        pass\n"),
    ),
    *rules(
        "staging",
        "metrale.checkpoint.convert",
        ("tests/checkpoint/test_convert.py",),
        ("magnitude.max() >= infinity", "magnitude.max() > infinity"),
        ("found = found or bool(", "found = bool("),
        ("(magnitude == infinity).any()", "False"),
        ("values[block], casting", "values[:_BLOCK][: len(out[block])], casting"),
        ("np.isinf(converted) & np.isfinite(array)", "np.isinf(converted)"),
    ),
    *SERVING_MUTANTS,
    *TOKENIZER_MUTANTS,
    *SEARCH_MUTANTS,
    *ADAPTER_MUTANTS,
    *CHECKPOINT_MUTANTS,
    *ENGINE_MUTANTS,
    *FAMILY_MUTANTS,
    *TRANSLATOR_MUTANTS,
    *FOLDER_MUTANTS,
    *HOSTILE_MUTANTS,
]
