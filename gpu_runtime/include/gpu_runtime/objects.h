/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Addresses and streams of Python objects, and back. The caller holds the GIL. */
#ifndef GPU_RUNTIME_OBJECTS_H
#define GPU_RUNTIME_OBJECTS_H

#include "errors.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The 64-bit number that an int is, or that a function of Python makes of any other object. */
static inline gpurt_code gpurt_number_(PyObject *object, const char *module, const char *function, uint64_t *number)
{
    gpurt_exception_ before = gpurt_exception_take_();
    gpurt_code code = GPURT_OK;
    PyObject *found = 0;
    uint64_t value = 0;
    if (!object) {
        code = gpurt_fail(GPURT_ERROR_TYPE, "expected an object, got NULL");
    } else if (!number) {
        code = gpurt_fail(GPURT_ERROR_VALUE, "expected room for a number, got NULL");
    } else {
        if (PyLong_CheckExact(object)) {
            value = PyLong_AsUnsignedLongLong(object);
            if (PyErr_Occurred()) /* out of range: the function says so in words of its own */
                PyErr_Clear();
            else
                found = Py_NewRef(object);
        }
        if (!found) {
            found = gpurt_python_(module, function, object, 0);
            value = found ? PyLong_AsUnsignedLongLong(found) : 0;
            if (PyErr_Occurred())
                code = gpurt_error_from_exception();
        }
        if (code == GPURT_OK)
            *number = value;
        Py_XDECREF(found);
    }
    gpurt_exception_put_(before);
    return code;
}

/*
 * The device address that an object stands for: an int (gpu_runtime.DevicePtr is one) of up to 64 bits, an object with
 * `__cuda_array_interface__`, or one whose attribute `ptr` is such an int. The address is as good as the object: keep it
 * alive. The `stream` of a `__cuda_array_interface__` is not waited for.
 */
static inline gpurt_code gpurt_pointer_from_object(PyObject *object, uint64_t *ptr)
{
    return gpurt_number_(object, "gpu_runtime.capi.objects", "device_address", ptr);
}

/* A new reference to a gpu_runtime.DevicePtr. */
static inline gpurt_code gpurt_pointer_to_object(uint64_t ptr, PyObject **object)
{
    gpurt_exception_ before;
    gpurt_code code = GPURT_OK;
    PyObject *number, *made;
    if (!object)
        return gpurt_fail(GPURT_ERROR_VALUE, "gpurt_pointer_to_object: expected room for an object, got NULL");
    before = gpurt_exception_take_();
    number = PyLong_FromUnsignedLongLong(ptr);
    made = number ? gpurt_python_("gpu_runtime.pointer", "DevicePtr", number, 0) : 0;
    Py_XDECREF(number);
    if (made)
        *object = made;
    else
        code = gpurt_error_from_exception();
    gpurt_exception_put_(before);
    return code;
}

/*
 * The stream that an object stands for, by the rules of gpu_runtime/streams.py: an int as it is, or what
 * `__cuda_stream__` returns, whose handle 0 is the legacy stream. The object owns the stream: keep it alive until the
 * work on it is done.
 */
static inline gpurt_code gpurt_stream_from_object(PyObject *object, uint64_t *stream)
{
    return gpurt_number_(object, "gpu_runtime.streams", "stream_handle", stream);
}

#ifdef __cplusplus
}
#endif

#endif
