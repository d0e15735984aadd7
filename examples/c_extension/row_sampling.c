/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * An extension module with a sampling loop of its own. It has a model of metrale decode, finds each row of logits by its
 * address, and chooses the next ids in C: on the host backend from the row itself, on a GPU from a copy of it.
 */
#include <gpu_runtime.h>

#include "sampling.h"

#include <stdlib.h>

/* What the loop holds. */
typedef struct loop {
    PyObject *model;
    int64_t backend;
    int32_t kind;
    gpurt_logits logits;
    sampling how;
    candidate *room;
    void *host; /* page-locked room for a row; NULL where rows are read in place */
    uint64_t *rngs;
} loop;

static void loop_end(loop *self)
{
    if (self->host)
        gpurt_free_host_pinned(self->backend, self->host);
    if (self->backend)
        gpurt_backend_release(self->backend);
    free(self->room);
    free(self->rngs);
}

static gpurt_code loop_begin(loop *self, PyObject *model, Py_ssize_t sequences, uint64_t seed)
{
    gpurt_code code;
    Py_ssize_t i;
    self->model = model;
    if ((code = gpurt_backend_from_object(model, &self->backend)) != GPURT_OK ||
        (code = gpurt_backend_kind(self->backend, &self->kind)) != GPURT_OK ||
        (code = gpurt_logits_from_object(model, &self->logits)) != GPURT_OK)
        return code;
    if (self->kind == GPURT_KIND_CUDA &&
        (code = gpurt_alloc_host_pinned(self->backend, self->logits.row_bytes, &self->host)) != GPURT_OK)
        return code;
    self->room = (candidate *)malloc((size_t)sampling_room(&self->how, self->logits.columns) * sizeof *self->room);
    self->rngs = (uint64_t *)malloc((size_t)(sequences + 1) * sizeof *self->rngs);
    if (!self->room || !self->rngs)
        return gpurt_fail(GPURT_ERROR_MEMORY, "row_sampling: no host memory");
    for (i = 0; i < sequences; ++i)
        self->rngs[i] = rng_state(seed, (uint64_t)i);
    return GPURT_OK;
}

/* Wait for a row and choose an id from it. Without the GIL. */
static gpurt_code choose(loop *self, uint64_t address, uint64_t event, uint64_t *rng, int64_t *id)
{
    const void *row = (const void *)(uintptr_t)address;
    gpurt_code code;
    if (self->host) {
        code = gpurt_stream_wait_event(self->backend, GPURT_STREAM_DEFAULT, event);
        if (code == GPURT_OK)
            code = gpurt_copy_d2h_on_stream(self->backend, address, self->host, self->logits.row_bytes,
                                            GPURT_STREAM_DEFAULT);
        row = self->host;
    } else {
        code = gpurt_event_synchronize(self->backend, event);
    }
    if (code != GPURT_OK)
        return code;
    *id = sample_row(row, self->logits.dtype, self->logits.columns, &self->how, rng, self->room);
    return *id < 0 ? gpurt_fail(GPURT_ERROR_VALUE, "row_sampling: a row holds a NaN or an infinity") : GPURT_OK;
}

/* Choose from the row that `first` is the address of, or from the `offset`-th after it. */
static gpurt_code choose_at(loop *self, PyObject *first, Py_ssize_t offset, uint64_t *rng, int64_t *id)
{
    uint64_t address = 0, event = 0;
    int64_t index = 0;
    PyObject *number;
    gpurt_code code = gpurt_pointer_from_object(first, &address);
    if (code == GPURT_OK)
        code = gpurt_logits_index(&self->logits, address, &index);
    if (code == GPURT_OK)
        code = gpurt_logits_row(&self->logits, index + offset, &address);
    if (code != GPURT_OK)
        return code;
    number = PyObject_CallMethod(self->model, "logits_event", "K", (unsigned long long)address);
    if (!number)
        return gpurt_error_from_exception();
    event = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    Py_BEGIN_ALLOW_THREADS
    code = choose(self, address, event, rng, id);
    Py_END_ALLOW_THREADS
    return code;
}

/* Append a new number to a list; 0 when that worked. */
static int append(PyObject *list, int64_t number)
{
    PyObject *item = PyLong_FromLongLong(number);
    int failed = !item || PyList_Append(list, item) < 0;
    Py_XDECREF(item);
    return failed;
}

/* The running sequences of a step, and their last ids: new lists, or 0 and an exception. */
static int running(PyObject *seqs, PyObject *results, int64_t eos, Py_ssize_t most, PyObject **ids, PyObject **lanes)
{
    Py_ssize_t i, size;
    *ids = PyList_New(0);
    *lanes = PyList_New(0);
    for (i = 0; *ids && *lanes && i < PyList_Size(results); ++i) {
        PyObject *result = PyList_GetItem(results, i), *last;
        size = PyList_Size(result);
        last = PyList_GetItem(result, size - 1);
        if (size >= most || PyLong_AsLongLong(last) == eos)
            continue;
        if (PyList_Append(*ids, last) < 0 || PyList_Append(*lanes, PyList_GetItem(seqs, i)) < 0)
            return 0;
    }
    return *ids && *lanes;
}

/* Decode one id of every running sequence and choose the next. Returns how many ran, -1 with an exception set. */
static Py_ssize_t step(loop *self, PyObject *seqs, PyObject *results, int64_t eos, Py_ssize_t most)
{
    PyObject *ids, *lanes, *first = 0;
    Py_ssize_t i, lane = 0, ran = -1;
    int64_t id = 0;
    gpurt_code code = GPURT_OK;
    if (running(seqs, results, eos, most, &ids, &lanes)) {
        ran = PyList_Size(lanes);
        if (ran && !(first = PyObject_CallMethod(self->model, "decode_batch", "OO", ids, lanes)))
            ran = -1;
    }
    for (i = 0; lane < ran && i < PyList_Size(results); ++i) {
        if (PyList_GetItem(seqs, i) != PyList_GetItem(lanes, lane))
            continue;
        code = choose_at(self, first, lane, &self->rngs[i], &id);
        if (code != GPURT_OK || append(PyList_GetItem(results, i), id)) {
            if (code != GPURT_OK)
                gpurt_raise(code, 0);
            ran = -1;
        }
        ++lane;
    }
    Py_XDECREF(first);
    Py_XDECREF(ids);
    Py_XDECREF(lanes);
    return ran;
}

/* The first id of each sequence, from the row of its prefill: a list of lists, or NULL with an exception set. */
static PyObject *first_ids(loop *self, PyObject *rows)
{
    Py_ssize_t i, count = PyList_Size(rows);
    PyObject *results = PyList_New(count);
    for (i = 0; results && i < count; ++i) {
        int64_t id = 0;
        gpurt_code code = choose_at(self, PyList_GetItem(rows, i), 0, &self->rngs[i], &id);
        PyObject *result = code == GPURT_OK ? PyList_New(0) : gpurt_raise(code, 0);
        if (!result || append(result, id)) {
            Py_XDECREF(result);
            Py_DECREF(results);
            return 0;
        }
        PyList_SetItem(results, i, result); /* takes the reference */
    }
    return results;
}

static const char doc[] =
    "generate(model, rows, seqs, max_new, eos, temperature=0.0, top_k=0, seed=0)\n--\n\n"
    "Return the ids of each prefilled sequence, chosen in C, up to `eos` or `max_new` of them.\n\n"
    "`rows` are the addresses that the prefills returned. With a temperature, ids are drawn.";

static PyObject *generate(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char names[][12] = {"model", "rows", "seqs", "max_new", "eos", "temperature", "top_k", "seed"};
    char *keywords[9] = {names[0], names[1], names[2], names[3], names[4], names[5], names[6], names[7], 0};
    PyObject *model, *rows, *seqs, *results = 0;
    Py_ssize_t most, ran = 1;
    long long eos, top_k = 0;
    unsigned long long seed = 0;
    loop self = {0};
    gpurt_code code;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!nL|dLK", keywords, &model, &PyList_Type, &rows, &PyList_Type,
                                     &seqs, &most, &eos, &self.how.temperature, &top_k, &seed))
        return 0;
    self.how.top_k = top_k;
    if (PyList_Size(rows) != PyList_Size(seqs) || most < 1 || !(self.how.temperature >= 0) || top_k < 0)
        return gpurt_raise(GPURT_ERROR_VALUE, "generate: expected as many rows as seqs, max_new of at least 1, and a "
                                              "temperature and top_k of at least 0");
    code = loop_begin(&self, model, PyList_Size(seqs), seed);
    if (code == GPURT_OK)
        results = first_ids(&self, rows);
    else
        gpurt_raise(code, 0);
    while (results && ran > 0)
        ran = step(&self, seqs, results, eos, most);
    if (ran < 0)
        Py_CLEAR(results);
    loop_end(&self);
    return results;
}

static PyMethodDef methods[] = {
    {"generate", (PyCFunction)(void (*)(void))generate, METH_VARARGS | METH_KEYWORDS, doc},
    {0, 0, 0, 0},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "row_sampling", "Sampling from logits rows, in C.", -1, methods, 0, 0, 0, 0,
};

PyMODINIT_FUNC PyInit_row_sampling(void)
{
    gpurt_code code = gpurt_import();
    return code == GPURT_OK ? PyModule_Create(&definition) : gpurt_raise(code, 0);
}
