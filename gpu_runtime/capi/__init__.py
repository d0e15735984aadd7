# SPDX-License-Identifier: MIT OR Apache-2.0
"""What C and C++ hosts use: the header's place, and the function table behind ``gpu_runtime._C_API``.

The table (`gpu_runtime.capi.table`) is made when somebody first asks for it, so importing `gpu_runtime` does not pay
for it. docs/c_api.md is the reference.
"""

from __future__ import annotations

from gpu_runtime.capi.place import ABI_VERSION, get_include

__all__ = ["ABI_VERSION", "get_include"]
