# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every model of the architecture gives transformers' numbers: a seeded draw of configurations and stored forms."""
