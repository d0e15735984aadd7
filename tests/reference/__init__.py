# SPDX-License-Identifier: MIT OR Apache-2.0
"""An independent float64 forward pass of NLLB and the tiny checkpoints it is checked on."""
