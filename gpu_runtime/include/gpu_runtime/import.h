/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Getting hold of the function table, and what surrounds each call of an entry. */
#ifndef GPU_RUNTIME_IMPORT_H
#define GPU_RUNTIME_IMPORT_H

#include "errors.h"

#ifdef __cplusplus
extern "C" {
#endif

static inline gpurt_table *gpurt_table_now_(void) { return __atomic_load_n(&gpurt_table_, __ATOMIC_SEQ_CST); }

static inline int gpurt_is_alive_(gpurt_table *table)
{
    return table && __atomic_load_n(&table->alive, __ATOMIC_SEQ_CST) != 0;
}

/* Whether the calls can be made now: imported, and the interpreter not yet ending. Never fails. */
static inline int gpurt_alive(void) { return gpurt_is_alive_(gpurt_table_now_()); }

/* Check a table's version. GPURT_ERROR_ABI says both versions. */
static inline gpurt_code gpurt_check_abi(const gpurt_table *table)
{
    char text[200];
    if (!table)
        return gpurt_fail(GPURT_ERROR_VALUE, "gpurt_check_abi: expected a table, got NULL");
    if (table->abi_major == GPURT_ABI_MAJOR && table->abi_minor >= GPURT_ABI_MINOR &&
        table->struct_size >= sizeof(gpurt_table))
        return GPURT_OK;
    snprintf(text, sizeof text,
             "gpu_runtime: compiled for ABI %d.%d, but the installed one has %d.%d: %s", GPURT_ABI_MAJOR,
             GPURT_ABI_MINOR, (int)table->abi_major, (int)table->abi_minor,
             table->abi_major == GPURT_ABI_MAJOR ? "install a newer one" : "compile against its own header");
    return gpurt_fail(GPURT_ERROR_ABI, text);
}

/*
 * Import gpu_runtime and take its function table, once for each program or shared library; later calls are cheap.
 * Any thread, with the GIL or without. GPURT_ERROR_SHUTDOWN when there is no interpreter, GPURT_ERROR_IMPORT when there
 * is no gpu_runtime in it, GPURT_ERROR_ABI when it is of another ABI.
 */
static inline gpurt_code gpurt_import(void)
{
    PyGILState_STATE gil;
    gpurt_exception_ before;
    gpurt_table *table;
    gpurt_code code;
    if (gpurt_alive())
        return GPURT_OK;
    if (!Py_IsInitialized())
        return gpurt_fail(GPURT_ERROR_SHUTDOWN, "gpurt_import: there is no Python interpreter");
    gil = PyGILState_Ensure();
    before = gpurt_exception_take_();
    table = (gpurt_table *)PyCapsule_Import(GPURT_CAPSULE, 0);
    code = table ? gpurt_check_abi(table) : gpurt_error_from_exception();
    if (code == GPURT_OK && !gpurt_is_alive_(table))
        code = gpurt_fail(GPURT_ERROR_SHUTDOWN, "gpurt_import: the interpreter is ending");
    if (code == GPURT_OK)
        __atomic_store_n(&gpurt_table_, table, __ATOMIC_SEQ_CST);
    gpurt_exception_put_(before);
    PyGILState_Release(gil);
    return code;
}

/* A call that is under way. */
typedef struct gpurt_call_ {
    gpurt_table *table;
    PyGILState_STATE gil;
    gpurt_exception_ before;
    gpurt_status status;
} gpurt_call_;

/* Begin a call: count it, refuse it when the interpreter is ending, take the GIL, keep the exception that is set. */
static inline gpurt_code gpurt_enter_(gpurt_call_ *call)
{
    gpurt_table *table = gpurt_table_now_();
    if (!table)
        return gpurt_fail(GPURT_ERROR_NOT_IMPORTED, "gpu_runtime: call gpurt_import() first");
    __atomic_add_fetch(&table->inflight, 1, __ATOMIC_SEQ_CST); /* first: whoever ends the interpreter reads it last */
    if (!gpurt_is_alive_(table)) {
        __atomic_sub_fetch(&table->inflight, 1, __ATOMIC_SEQ_CST);
        return gpurt_fail(GPURT_ERROR_SHUTDOWN, "gpu_runtime: the Python interpreter is ending or has ended");
    }
    call->table = table;
    call->gil = PyGILState_Ensure();
    call->before = gpurt_exception_take_();
    call->status.code = GPURT_ERROR_INTERRUPTED;
    memcpy(call->status.message, "interrupted", sizeof "interrupted");
    return GPURT_OK;
}

/* End a call; returns its code. */
static inline gpurt_code gpurt_leave_(gpurt_call_ *call)
{
    if (PyErr_Occurred())
        PyErr_Clear();
    gpurt_exception_put_(call->before);
    PyGILState_Release(call->gil);
    __atomic_sub_fetch(&call->table->inflight, 1, __ATOMIC_SEQ_CST);
    return call->status.code == GPURT_OK ? GPURT_OK : gpurt_fail(call->status.code, call->status.message);
}

/* Give up a reference, on any thread; what it refers to is leaked when the interpreter has begun to end. Before
 * gpurt_import() nothing tells of that, and the interpreter must not end meanwhile. */
static inline void gpurt_drop_(PyObject *object)
{
    gpurt_table *table = gpurt_table_now_();
    if (!object || !Py_IsInitialized())
        return;
    if (table)
        __atomic_add_fetch(&table->inflight, 1, __ATOMIC_SEQ_CST); /* the interpreter's end waits for this */
    if (!table || gpurt_is_alive_(table)) {
        PyGILState_STATE gil = PyGILState_Ensure();
        Py_DECREF(object);
        PyGILState_Release(gil);
    }
    if (table)
        __atomic_sub_fetch(&table->inflight, 1, __ATOMIC_SEQ_CST);
}

#ifdef __cplusplus
}
#endif

#endif
