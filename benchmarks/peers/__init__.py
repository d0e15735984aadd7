# SPDX-License-Identifier: MIT OR Apache-2.0
"""Other systems on the same checkpoints and the same protocol, each in a process of its own.

`python -m benchmarks.peers` runs both and writes a JSON; `transformers_peer` and `ctranslate2_peer` can be run by hand:
`python -m benchmarks.peers.transformers_peer --device cuda --dtype float16 --batches 1,8 600M=FOLDER`, where FOLDER is
a checkpoint, for example one that `benchmarks.shapes` wrote. They print a line of JSON for each result.
"""
