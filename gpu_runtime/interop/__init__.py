# SPDX-License-Identifier: MIT OR Apache-2.0
"""Memory given to and taken from other libraries: DLPack, array interfaces, the buffer protocol."""
