# SPDX-License-Identifier: MIT OR Apache-2.0
"""Refuses, when it is imported, any interpreter but the main one. To be imported before NumPy.

NumPy and CuPy keep state for the whole process. In a subinterpreter NumPy warns, or refuses to load a second time in
words that say nothing of the cause, and what it then shares with the main interpreter is what neither expects.
"""

from __future__ import annotations

import sys


def is_main() -> bool:
    """Return whether the calling interpreter is the process's main one."""
    if sys.implementation.name != "cpython":
        return True  # no other has subinterpreters
    try:
        import ctypes
    except ImportError as error:  # Python 3.12 refuses it where interpreters have locks of their own
        if "subinterpreters" not in str(error):
            raise
        return False
    current, main = ctypes.pythonapi.PyInterpreterState_Get, ctypes.pythonapi.PyInterpreterState_Main
    current.restype = main.restype = ctypes.c_void_p
    return bool(current() == main())


if not is_main():
    raise ImportError(
        "gpu_runtime: expected the main interpreter, got a subinterpreter, which NumPy and CuPy do not support; "
        "import it in the main interpreter, or in a process of its own"
    )
