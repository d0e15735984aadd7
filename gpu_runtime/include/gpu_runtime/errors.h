/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Codes, messages and Python exceptions. */
#ifndef GPU_RUNTIME_ERRORS_H
#define GPU_RUNTIME_ERRORS_H

#include "abi.h"

#ifndef Py_PYTHON_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#endif

#include <stdio.h>
#include <string.h>

#if !defined(__GNUC__)
#error "gpu_runtime.h: expected gcc or clang, whose __atomic builtins, __thread and weak symbols it uses"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* One of each in a program or shared library, however many of its files include this header; never seen outside it. */
__attribute__((weak, visibility("hidden"))) __thread gpurt_status gpurt_status_ = {GPURT_OK, {0}};
__attribute__((weak, visibility("hidden"))) gpurt_table *gpurt_table_ = 0;

/* The message of the last failed call on this thread, "" when none failed yet. Never fails; needs no interpreter. */
static inline const char *gpurt_last_error(void) { return gpurt_status_.message; }

/* The code of the last failed call on this thread. Never fails. */
static inline gpurt_code gpurt_last_code(void) { return gpurt_status_.code; }

/* Note a failure of the host's own; returns `code`. The text is cut to what fits, at the start of a character. */
static inline gpurt_code gpurt_fail(gpurt_code code, const char *text)
{
    size_t most = sizeof gpurt_status_.message - 1;
    size_t size = text ? strlen(text) : 0;
    if (size > most)
        for (size = most; size && ((unsigned char)text[size] & 0xC0) == 0x80;)
            --size;
    gpurt_status_.code = code;
    if (size)
        memmove(gpurt_status_.message, text, size);
    gpurt_status_.message[size] = 0;
    return code;
}

/* The exception that is set on this thread, kept while something else runs. */
typedef struct gpurt_exception_ {
    PyObject *type, *value, *trace;
} gpurt_exception_;

#if PY_VERSION_HEX >= 0x030C0000 && (!defined(Py_LIMITED_API) || Py_LIMITED_API + 0 >= 0x030C0000)
static inline gpurt_exception_ gpurt_exception_take_(void)
{
    gpurt_exception_ kept = {0, PyErr_GetRaisedException(), 0};
    return kept;
}

static inline void gpurt_exception_put_(gpurt_exception_ kept) { PyErr_SetRaisedException(kept.value); }
#else
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* since 3.12, whose successors the limited API lacks */
static inline gpurt_exception_ gpurt_exception_take_(void)
{
    gpurt_exception_ kept;
    PyErr_Fetch(&kept.type, &kept.value, &kept.trace);
    return kept;
}

static inline void gpurt_exception_put_(gpurt_exception_ kept) { PyErr_Restore(kept.type, kept.value, kept.trace); }

static inline PyObject *gpurt_exception_value_(gpurt_exception_ *kept)
{
    PyErr_NormalizeException(&kept->type, &kept->value, &kept->trace);
    return kept->value;
}
#pragma GCC diagnostic pop
#endif

#if PY_VERSION_HEX >= 0x030C0000 && (!defined(Py_LIMITED_API) || Py_LIMITED_API + 0 >= 0x030C0000)
static inline PyObject *gpurt_exception_value_(gpurt_exception_ *kept) { return kept->value; }
#endif

/* Call `function` of a module with one or two arguments; NULL with an exception set when that fails. */
static inline PyObject *gpurt_python_(const char *module, const char *function, PyObject *first, PyObject *second)
{
    PyObject *found = PyImport_ImportModule(module);
    PyObject *callable = found ? PyObject_GetAttrString(found, function) : 0;
    PyObject *result = callable ? PyObject_CallFunctionObjArgs(callable, first, second, (PyObject *)0) : 0;
    Py_XDECREF(callable);
    Py_XDECREF(found);
    return result;
}

/*
 * Take the Python exception that is set: returns its code, and GPURT_OK when none is set. Its text becomes the last
 * error. The exception is not set any more. The caller holds the GIL.
 */
static inline gpurt_code gpurt_error_from_exception(void)
{
    gpurt_exception_ kept = gpurt_exception_take_();
    PyObject *value = (kept.value || kept.type) ? gpurt_exception_value_(&kept) : 0;
    PyObject *pair, *text;
    const char *words = 0;
    gpurt_code code = GPURT_ERROR_RUNTIME;
    if (!value)
        return GPURT_OK;
    pair = gpurt_python_("gpu_runtime.capi.codes", "described", value, 0);
    if (!pair) { /* there is no gpu_runtime to ask */
        PyErr_Clear();
        code = PyErr_GivenExceptionMatches(value, PyExc_ImportError) ? GPURT_ERROR_IMPORT : GPURT_ERROR_RUNTIME;
    }
    text = pair ? PyTuple_GetItem(pair, 1) : PyObject_Str(value);
    if (text)
        words = PyUnicode_AsUTF8AndSize(text, 0);
    if (pair && words)
        code = (gpurt_code)PyLong_AsLong(PyTuple_GetItem(pair, 0));
    gpurt_fail(code, words ? words : "an exception that cannot be shown");
    if (pair)
        Py_DECREF(pair);
    else
        Py_XDECREF(text);
    PyErr_Clear();
    Py_XDECREF(kept.type);
    Py_XDECREF(kept.value);
    Py_XDECREF(kept.trace);
    return code;
}

/*
 * Set the Python exception that a code stands for, with the last error as its text unless `message` is given. Returns
 * NULL, so that `return gpurt_raise(code, 0);` ends a function of an extension module. The caller holds the GIL; an
 * exception that was set before is replaced.
 */
static inline PyObject *gpurt_raise(gpurt_code code, const char *message)
{
    const char *words = message ? message : gpurt_last_error();
    PyObject *number, *text, *error = 0;
    PyErr_Clear();
    number = PyLong_FromLong(code);
    text = PyUnicode_DecodeUTF8(words, (Py_ssize_t)strlen(words), "replace");
    if (number && text)
        error = gpurt_python_("gpu_runtime.capi.codes", "exception_of", number, text);
    if (error)
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
    Py_XDECREF(text);
    Py_XDECREF(number);
    return 0;
}

#ifdef __cplusplus
}
#endif

#endif
