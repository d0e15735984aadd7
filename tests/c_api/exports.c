/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The header's inline functions, to be found by name, and threads that Python did not make. */
#include <gpu_runtime.h>

#include <pthread.h>
#include <stdlib.h>

typedef void (*function_t)(void);

function_t exported(const char *name);
gpurt_code take_exception(PyObject *error);
int keeps_exception(PyObject *error, PyObject *object, int64_t backend);
PyObject *raise_code(int code, const char *text);
int64_t crowd(int64_t backend, int threads, int calls);

#define LIST(X)                                                                                                        \
    X(import) X(alive) X(last_error) X(last_code) X(fail) X(error_from_exception) X(raise) X(check_abi)                \
    X(backend_from_object) X(backend_release) X(backend_kind) X(alloc) X(alloc_managed) X(free) X(alloc_host_pinned)   \
    X(free_host_pinned) X(find_block) X(mark_written) X(copy_h2d) X(copy_d2h) X(copy_d2d) X(copy_h2d_on_stream)        \
    X(copy_d2h_on_stream) X(copy_h2d_async) X(copy_d2h_async) X(copy_d2d_async) X(memset) X(memset_async)              \
    X(default_stream) X(create_stream) X(destroy_stream) X(synchronize) X(create_event) X(destroy_event)               \
    X(record_event) X(stream_wait_event) X(event_query) X(event_synchronize) X(event_elapsed_ms)                       \
    X(logits_from_object) X(logits_row) X(logits_index) X(pointer_from_object) X(pointer_to_object)                    \
    X(stream_from_object)

#define ENTRY(name) {#name, (function_t)gpurt_##name},

static const struct {
    const char *name;
    function_t function;
} functions[] = {LIST(ENTRY)};

function_t exported(const char *name)
{
    size_t i;
    for (i = 0; i < sizeof functions / sizeof *functions; ++i)
        if (strcmp(functions[i].name, name) == 0)
            return functions[i].function;
    return 0;
}

/* Set an exception, and take it as a host would that has called Python. */
gpurt_code take_exception(PyObject *error)
{
    gpurt_code code;
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    code = gpurt_error_from_exception();
    return PyErr_Occurred() ? -99 : code;
}

/* Make calls of every kind, some of which fail, while an exception is set: it must be there after each. */
int keeps_exception(PyObject *error, PyObject *object, int64_t backend)
{
    PyObject *type, *value, *trace, *made = 0;
    uint64_t number = 0;
    int32_t kind = 0;
    int place = 0;
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);
#define STILL(call, expected) (((call) == (expected) && PyErr_Occurred() == (PyObject *)Py_TYPE(error)) || !(place = __LINE__))
    if (STILL(gpurt_import(), GPURT_OK) && STILL(gpurt_backend_kind(backend, &kind), GPURT_OK) &&
        STILL(gpurt_free(backend, 1), GPURT_ERROR_INVALID_POINTER) &&
        STILL(gpurt_pointer_from_object(object, &number), GPURT_ERROR_TYPE) &&
        STILL(gpurt_stream_from_object(object, &number), GPURT_ERROR_TYPE) &&
        STILL(gpurt_pointer_to_object(5, &made), GPURT_OK))
        place = 0;
    Py_XDECREF(made);
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (value != error)
        place = __LINE__;
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return place;
}

PyObject *raise_code(int code, const char *text)
{
    if (!text)
        gpurt_fail(code, "the last error");
    return gpurt_raise(code, text);
}

typedef struct {
    pthread_t thread;
    int64_t backend;
    int64_t wrong;
    int number, calls;
} worker_t;

enum { SIZE = 257 };

/* Four calls a round, and a check of what they did: fill, write, copy, read. */
static int round_of(worker_t *worker, uint64_t first, uint64_t second, int round)
{
    unsigned char sent[SIZE], got[SIZE];
    int i, fill = (worker->number * 31 + round) & 255, wrong = 0;
    for (i = 0; i < SIZE; ++i)
        sent[i] = (unsigned char)(i * 7 + worker->number + round);
    wrong += gpurt_memset(worker->backend, second, fill, SIZE) != GPURT_OK;
    wrong += gpurt_copy_h2d(worker->backend, sent, first, SIZE) != GPURT_OK;
    wrong += gpurt_copy_d2d(worker->backend, first + 7, second, SIZE - 7) != GPURT_OK;
    wrong += gpurt_copy_d2h(worker->backend, second, got, SIZE) != GPURT_OK;
    wrong += memcmp(sent + 7, got, SIZE - 7) != 0;
    for (i = SIZE - 7; i < SIZE; ++i)
        wrong += got[i] != fill;
    return wrong;
}

static void *work(void *given)
{
    worker_t *worker = (worker_t *)given;
    uint64_t first = 0, second = 0;
    int round;
    char expected[64];
    worker->wrong += gpurt_alloc(worker->backend, SIZE, "crowd", &first) != GPURT_OK;
    worker->wrong += gpurt_alloc(worker->backend, SIZE, "crowd", &second) != GPURT_OK;
    for (round = 0; round < worker->calls / 4; ++round)
        worker->wrong += round_of(worker, first, second, round);
    /* each thread finds its own last error, whatever the others do */
    worker->wrong += gpurt_free(worker->backend, first + 1 + (uint64_t)worker->number) != GPURT_ERROR_INVALID_POINTER;
    snprintf(expected, sizeof expected, "0x%llx", (unsigned long long)(first + 1 + (uint64_t)worker->number));
    worker->wrong += strstr(gpurt_last_error(), expected) == 0;
    worker->wrong += gpurt_free(worker->backend, first) != GPURT_OK;
    worker->wrong += gpurt_free(worker->backend, second) != GPURT_OK;
    worker->wrong += strstr(gpurt_last_error(), expected) == 0;
    return 0;
}

/* Run `calls` calls on each of so many threads at once; returns how much went wrong. */
int64_t crowd(int64_t backend, int threads, int calls)
{
    worker_t *workers = (worker_t *)calloc((size_t)threads, sizeof *workers);
    int64_t wrong = 0;
    int i;
    for (i = 0; i < threads; ++i) {
        workers[i].backend = backend;
        workers[i].number = i;
        workers[i].calls = calls;
        if (pthread_create(&workers[i].thread, 0, work, &workers[i]) != 0)
            abort();
    }
    for (i = 0; i < threads; ++i) {
        pthread_join(workers[i].thread, 0);
        wrong += workers[i].wrong;
    }
    free(workers);
    return wrong;
}
