# SPDX-License-Identifier: MIT OR Apache-2.0
"""ModelVision: prompts with images."""

from __future__ import annotations

from collections.abc import Sequence


class ModelVision:
    """The vision encoder's side of a prefill. A model for text alone should refuse images, not ignore them."""

    def prepare_vision_embed(self, images: Sequence[object]) -> None:
        """Encode ``images`` and keep the rows for the next prefill, whose prompt has their places. Default: nothing."""

    def ep_sync_vision_embeds(self, tokens: Sequence[int]) -> None:
        """Give every rank the same image rows for the prompt ``tokens``. Default: nothing."""

    def prepare_vision_embed_batched(self, per_request: Sequence[Sequence[object]]) -> list[tuple[int, int, int, int]]:
        """Encode the images of several requests in one pass.

        Returns
        -------
        list[tuple[int, int, int, int]]
            Per request: its first row and first grid in the common output, its images, its rows. Default: empty.
        """
        return []

    def set_vision_slice_base(self, row: int, grid: int, images: int) -> None:
        """Say where the next prefill's image rows begin in a batched output, and how many images it has.

        All zero resets. Default: nothing.
        """

    def tokens_contain_vision_pad(self, tokens: Sequence[int]) -> bool:
        """Return whether ``tokens`` has an image's place in it, so that ids alone cannot rebuild its KV.

        Default: False.
        """
        return False
