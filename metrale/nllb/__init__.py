# SPDX-License-Identifier: MIT OR Apache-2.0
"""The NLLB-200 and M2M-100 family of translation models."""
