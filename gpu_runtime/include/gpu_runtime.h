/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * gpu_runtime for C and C++ hosts. Header-only: C99 or C++17, gcc or clang, Python's limited API of 3.11 and later.
 * `metrale-config --cflags` prints the flags to compile with; docs/c_api.md is the reference.
 *
 * - Every function returns a gpurt_code, 0 when it succeeded; gpurt_last_error() is the message of the last failure on
 *   the calling thread. The exceptions to that are marked "never fails".
 * - No function leaves a Python exception set, and one that was set before the call is still set after it.
 *   gpurt_raise() turns a code into a Python exception.
 * - Functions declared in calls.h may be called on any thread, with the GIL or without, after gpurt_import() succeeded.
 *   They take the GIL, and give it up where they wait. Once the interpreter has begun to end they return
 *   GPURT_ERROR_SHUTDOWN and touch nothing of Python.
 * - Functions declared in objects.h and errors.h take or make Python objects: the caller holds the GIL.
 */
#ifndef GPU_RUNTIME_H
#define GPU_RUNTIME_H

#include "gpu_runtime/abi.h"
#include "gpu_runtime/errors.h"
#include "gpu_runtime/import.h"
#include "gpu_runtime/calls.h"
#include "gpu_runtime/objects.h"
#ifdef __cplusplus
#include "gpu_runtime/raii.hpp"
#endif

#endif
